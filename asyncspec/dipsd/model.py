"""The deployment DiP-SD plans for: users who draft on their own devices, one verifier for all.

Times are milliseconds, work is FLOPs of the whole target, sizes are bytes. Latencies are affine, as
the paper profiles them: a fixed part (kernel launches, weights read once) and a part by FLOPs.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

MemoryRule = Literal["batch", "all"]


class Shape(Struct, frozen=True, forbid_unknown_fields=True):
    """What the FLOP and memory counts of a model need (the paper's J, h1 and h2).

    The paper counts multi-head attention and a feed-forward block of two matrices. Models with
    grouped heads have smaller caches than this says.
    """

    layers: int
    hidden: int
    ffn: int

    def flops(self, tokens: int, prefix: int) -> float:
        """FLOPs of one pass over ``tokens`` new positions after ``prefix`` (F^v; F^d for one)."""
        wide = 2 * self.hidden + prefix + tokens + self.ffn
        return 4.0 * self.layers * self.hidden * tokens * wide

    def weight_bytes(self, layers: int) -> int:
        """Bytes of ``layers`` layers in half precision."""
        return layers * (8 * self.hidden**2 + 4 * self.hidden * self.ffn)

    def cache_bytes(self, layers: int) -> int:
        """Bytes that one position's keys and values take on ``layers`` layers."""
        return 4 * layers * self.hidden


class User(Struct, frozen=True):
    """One user and the device that drafts for them.

    ``token_ms`` is the time of one drafted token, ``link_ms`` what a round pays on the link
    however long its draft is, ``link_token_ms`` what each drafted token adds to it. These are what
    a running cluster can measure; a description by FLOPs is turned into them (``drafted_ms``).
    """

    name: str
    alpha: float
    prefix: int
    token_ms: float
    link_ms: float = 0.0
    link_token_ms: float = 0.0


class Stage(Struct, frozen=True):
    """A verify stage: ``layers`` of the target; a pass takes ``fixed_ms + ms_per_flop x FLOPs``."""

    layers: int
    ms_per_flop: float
    fixed_ms: float
    memory_bytes: float = float("inf")


class Verifier(Struct, frozen=True):
    """The target on one stage (the paper's server) or several in a row.

    ``hop_ms`` lies between two stages and keeps neither of them busy. ``memory`` says whose caches
    have to fit: of the batch being verified (the paper) or of all users (a real server).
    """

    shape: Shape
    stages: tuple[Stage, ...]
    hop_ms: float = 0.0
    memory: MemoryRule = "all"


class Deployment(Struct, frozen=True):
    """Users and verifier; ``longest`` is the longest draft allowed (the paper's L_ub).

    ``batch_rows``: rows of a pass that users share at most, where everybody has one row for each
    drafted token and one for the root, and all are padded to the longest draft; 0: any number.
    """

    users: tuple[User, ...]
    verifier: Verifier
    longest: int = 20
    batch_rows: int = 0


def drafted_ms(shape: Shape, ms_per_flop: float, fixed_ms: float, prefix: int) -> float:
    """Milliseconds a drafted token takes on a device profiled as affine in FLOPs (d_m)."""
    return ms_per_flop * shape.flops(1, prefix) + fixed_ms


def even_stages(shape: Shape, whole: Stage, count: int) -> tuple[Stage, ...]:
    """``whole`` cut into ``count`` stages: layers and fixed cost are split, the speed is not."""
    base, more = divmod(shape.layers, count)
    sizes = [base + (i < more) for i in range(count)]
    return tuple(
        Stage(n, whole.ms_per_flop, whole.fixed_ms * n / shape.layers, whole.memory_bytes)
        for n in sizes
    )
