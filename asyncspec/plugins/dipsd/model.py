"""Deployments and plans of DiP-SD: users draft on their own devices, one verifier serves them; and
a deployment tabled for searches.

Times are milliseconds, work is FLOPs of the whole target, sizes are bytes. Latencies are affine, as
the paper profiles them: a fixed part (kernel launches, weights read once) and a part by FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from asyncspec.core.errors import UserError

MAX_USERS = 1024
"""Upper bound on the users of a deployment that is planned for."""

MemoryRule = Literal["batch", "all"]
Count = Annotated[int, Meta(ge=1, le=10**9)]


class ModelShape(Struct, frozen=True, forbid_unknown_fields=True):
    """The paper's J, h1 and h2: multi-head attention and a feed-forward block of two matrices.
    Models with grouped heads have smaller caches than this says."""

    layers: Count
    hidden: Count
    ffn: Count

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
    """One user and the device that drafts for them."""

    name: str
    # Acceptance of a drafted token, and positions before the draft.
    alpha: float
    prefix: int
    # Time of a drafted token (the paper's d, affine in FLOPs); a round's time on the link whatever
    # its length, and what each drafted token adds.
    token_ms: float
    link_ms: float = 0.0
    link_token_ms: float = 0.0


class StageProfile(Struct, frozen=True):
    """A verify stage: ``layers`` of the target; a pass takes ``fixed_ms + ms_per_flop x FLOPs``."""

    layers: int
    ms_per_flop: float
    fixed_ms: float
    memory_bytes: float = float("inf")


class Verifier(Struct, frozen=True):
    """The target on one stage (the paper's server) or several in a row."""

    shape: ModelShape
    stages: tuple[StageProfile, ...]
    # Between two stages; keeps neither of them busy.
    hop_ms: float = 0.0
    # Whose caches have to fit: the current batch's (the paper) or all users' (a real server).
    memory: MemoryRule = "all"


class Deployment(Struct, frozen=True):
    """Users and verifier."""

    users: tuple[User, ...]
    verifier: Verifier
    # Tokens of the longest draft allowed (the paper's L_ub).
    longest: int = 20
    # Most rows of a pass that users share; 0: any number. Each user has a row for the root and one
    # for each drafted token, padded to the longest draft of the batch.
    batch_rows: int = 0


def even_stages(shape: ModelShape, whole: StageProfile, count: int) -> tuple[StageProfile, ...]:
    """``whole`` cut into ``count`` stages: layers and fixed cost are split, the speed is not."""
    base, more = divmod(shape.layers, count)
    sizes = [base + (i < more) for i in range(count)]
    return tuple(
        replace(whole, layers=n, fixed_ms=whole.fixed_ms * n / shape.layers) for n in sizes
    )


Groups = tuple[tuple[int, ...], ...]
"""Users by batch, as indices into the deployment's users."""


class Plan(Struct, frozen=True):
    """Batches in the order in which the verifier visits them, round and round."""

    batches: Groups
    # Draft length by user.
    lengths: tuple[int, ...]


def violation(plan: Plan, deployment: Deployment) -> str:
    """Why ``plan`` is not one for ``deployment``; empty if it is."""
    users = len(deployment.users)
    if sorted(chain.from_iterable(plan.batches)) != list(range(users)):
        return "every user must be in exactly one batch"
    if not all(plan.batches):
        return "a batch has no users"
    if len(plan.lengths) != users:
        return "every user needs a draft length"
    if not all(1 <= k <= deployment.longest for k in plan.lengths):
        return f"draft lengths must be between 1 and {deployment.longest}"
    return ""


class ScannedCount(Struct, frozen=True):
    """One batch count of the scan; tokens a second."""

    batches: int
    # None: nothing better than with fewer batches was found.
    throughput: float | None
    # No plan with this many batches or more exceeds it.
    bound: float


class PlanResult(Struct, frozen=True):
    """The plan, and what was scanned to find it; other batch counts are ruled out."""

    plan: Plan
    scanned: tuple[ScannedCount, ...]
    # Tokens a second that no plan exceeds; where the plan has as many, it is proved to be the best.
    bound: float


def capacity(verifier: Verifier) -> float:
    """Positions whose keys and values fit beside the weights, on the tightest stage."""
    shape = verifier.shape
    return min(
        (stage.memory_bytes - shape.weight_bytes(stage.layers)) / shape.cache_bytes(stage.layers)
        for stage in verifier.stages
    )


def check_memory(deployment: Deployment) -> None:
    """Raise ``UserError`` if no plan can fit."""
    room = capacity(deployment.verifier)
    prefixes = [user.prefix for user in deployment.users]
    if room < 0:
        raise UserError("the target's weights do not fit in the verifier's memory")
    if deployment.verifier.memory == "all":
        if sum(prefixes) > room:
            raise UserError(
                f"the users' caches hold {sum(prefixes)} positions; the verifier has room for "
                f"{int(room)}: fewer users, shorter prefixes, or more memory"
            )
    elif max(prefixes) > room:
        raise UserError(
            f"a prefix of {max(prefixes)} positions does not fit; the verifier has room for "
            f"{int(room)}"
        )


DRAFT = ModelShape(28, 2048, 6144)
TARGET = ModelShape(64, 5120, 25600)
DEVICE_MS_PER_FLOP, DEVICE_FIXED_MS = 4.0305e-11, 33.8151
SERVER = StageProfile(TARGET.layers, 1.2077e-11, 95.1074, 8e10)
USERS, ALPHA, PREFIX, LINK_MS, LONGEST = 6, 0.78, 512, 3.0, 20

FIRST_LENGTH = 7
"""Every draft's length where Algorithm 1 starts, and of the fixed-length baseline."""


def paper(
    users: int = USERS,
    alpha: float = ALPHA,
    *,
    token_ms: float | None = None,
    link_ms: float = LINK_MS,
    prefix: int = PREFIX,
    stages: int = 1,
    hop_ms: float = 0.0,
) -> Deployment:
    """``users`` equal users; ``token_ms`` replaces the profile of the paper's device.

    More than one stage is ours: the paper's server cut into equal parts, its fixed cost with it.
    """
    if token_ms is None:
        token_ms = DEVICE_MS_PER_FLOP * DRAFT.flops(1, prefix) + DEVICE_FIXED_MS
    verifier = Verifier(TARGET, even_stages(TARGET, SERVER, stages), hop_ms, "batch")
    people = (User(f"user{m + 1}", alpha, prefix, token_ms, link_ms) for m in range(users))
    return Deployment(tuple(people), verifier, LONGEST)


def expected_tokens(alpha: float, length: int) -> float:
    """u(l): accepted tokens of a linear draft and the bonus token, 1 to ``length`` + 1."""
    if alpha >= 1:
        return float(length + 1)
    return (1.0 - alpha ** (length + 1)) / (1.0 - alpha)


class Budget:
    """``left`` units of work, each about a microsecond of a slow core."""

    def __init__(self, units: float) -> None:
        self.left = units

    def spend(self, units: float) -> bool:
        """Whether any was left. Work once begun is completed, so ``left`` may fall below 0."""
        if self.left <= 0:
            return False
        self.left -= units
        return True

    @contextmanager
    def part(self, units: float) -> Iterator[Budget]:
        """At most ``units`` of what is left; what is not spent of it is returned."""
        part = Budget(max(0.0, min(units, self.left)))
        self.left -= part.left
        yield part
        self.left += part.left


class Tables:
    """The functions of the model, tabled by user and draft length. Never changed once made.

    ``gain[m][k]`` is u_m(k) in tokens, ``draft[m][k]`` drafting and sending k tokens in ms
    (tau^d + tau^c), ``rows[prefix][k]`` FLOPs of a user with that prefix; all with index 0 for no
    draft at all. ``slopes`` and ``fixed``: ms a FLOP of the whole target, and ms a pass, by stage;
    ``slope`` and ``through``: their sums, with the hops between stages.
    """

    def __init__(self, deployment: Deployment) -> None:
        verifier, users, shape = deployment.verifier, deployment.users, deployment.verifier.shape
        self.deployment = deployment
        self.longest = deployment.longest
        self.users = len(users)
        lengths = range(self.longest + 1)
        self.gain = [[expected_tokens(u.alpha, k) for k in lengths] for u in users]
        self.draft = [
            [k * (u.token_ms + u.link_token_ms) + u.link_ms for k in lengths] for u in users
        ]
        self.prefix = [u.prefix for u in users]
        self.rows = {p: [shape.flops(k, p) for k in lengths] for p in set(self.prefix)}
        self.slopes = [s.ms_per_flop * s.layers / shape.layers for s in verifier.stages]
        self.fixed = [s.fixed_ms for s in verifier.stages]
        self.slope = sum(self.slopes)
        self.through = sum(self.fixed) + verifier.hop_ms * (len(self.fixed) - 1)
        self.capacity = capacity(verifier)

    def work(self, users: Sequence[int]) -> list[float]:
        """FLOPs of a batch by its longest draft: all its rows are padded to the longest of them."""
        row = self.rows[max([self.prefix[m] for m in users])]
        return [len(users) * flops for flops in row]

    def batch_work(self, users: Sequence[int], lengths: Sequence[int]) -> float:
        """FLOPs of a batch with these draft lengths (by user)."""
        return self.work(users)[max([lengths[m] for m in users])]

    def stages(self, work: float) -> tuple[float, ...]:
        """Milliseconds of a pass on each stage."""
        return tuple([s * work + f for s, f in zip(self.slopes, self.fixed, strict=True)])

    def passing(self, work: float) -> float:
        """Milliseconds from the first stage's start to the last one's end (the paper's t^v)."""
        return self.slope * work + self.through

    def server(self, work: float, batches: int) -> float:
        """Milliseconds the busiest stage needs for all batches of a cycle, ``work`` in sum."""
        slope, fixed = self.busiest(work, batches)
        return slope * work + fixed * batches

    def busiest(self, work: float, batches: int) -> tuple[float, float]:
        """(ms a FLOP, fixed ms a batch) of the stage that ``server`` is about."""
        stages = zip(self.slopes, self.fixed, strict=True)
        return max(stages, key=lambda stage: stage[0] * work + stage[1] * batches)

    def longest_in(self, size: int) -> int:
        """The longest draft with which so many users fit in one pass; 0: none. One always fits."""
        rows = self.deployment.batch_rows
        if size == 1 or not rows:
            return self.longest
        return max(0, min(self.longest, rows // size - 1))

    def fits(self, users: Sequence[int]) -> bool:
        """Whether a batch fits in one pass with drafts of one token, and its caches in the memory
        (``check_memory`` has checked all users' where these must fit together)."""
        if self.longest_in(len(users)) < 1:
            return False
        if self.deployment.verifier.memory == "all":
            return True
        return len(users) * max(self.prefix[m] for m in users) <= self.capacity

    def all_fit(self, groups: Iterable[Sequence[int]]) -> bool:
        """Whether every batch fits."""
        return all(self.fits(group) for group in groups)
