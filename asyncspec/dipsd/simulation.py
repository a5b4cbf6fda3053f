"""What simulated users and verifier share, and what a run of them is measured by. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from asyncspec.dipsd.acceptance import drawn_tokens, expected_tokens
from asyncspec.dipsd.noise import DRAFT, LINK, VERIFY, Noise
from asyncspec.dipsd.tables import Tables


class Simulated(Struct, frozen=True):
    """Measured after a start-up: tokens a second, ms a cycle (or a pass), stages' busy shares."""

    throughput: float
    period_ms: float
    busy: tuple[float, ...]
    # Tokens a second of each user.
    by_user: tuple[float, ...] = ()


class Players:
    """Users and stages as durations."""

    def __init__(self, tables: Tables, noise: Noise) -> None:
        self.tables, self.noise = tables, noise
        users = tables.deployment.users
        self.alphas = noise.alphas or tuple(user.alpha for user in users)
        self.links = [user.link_ms for user in users]

    def drafting(self, m: int, length: int, round_: int) -> float:
        """Milliseconds from a verdict to the next draft's arrival."""
        link, whole = self.links[m], self.tables.draft[m][length]
        noise = self.noise
        drafted = (whole - link) * noise.factor(DRAFT, m, round_, noise.sigma_of(DRAFT, m))
        return drafted + link * noise.factor(LINK, m, round_, noise.sigma_of(LINK, m))

    def passing(self, users: Sequence[int], longest: int, round_: int) -> list[float]:
        """Milliseconds on each stage."""
        tables, noise, work = self.tables, self.noise, self.tables.work(users)[longest]
        who = users[0] * len(tables.fixed)
        return [
            (slope * work + fixed)
            * noise.factor(VERIFY, who + p, round_, noise.sigma_of(VERIFY, p))
            for p, (slope, fixed) in enumerate(zip(tables.slopes, tables.fixed, strict=True))
        ]

    def tokens(self, m: int, length: int, round_: int) -> float:
        """What a round brings the user."""
        if self.noise.expected:
            return expected_tokens(self.alphas[m], length)
        return float(drawn_tokens(self.alphas[m], length, self.noise.seed, round_, m))


class Mark(NamedTuple):
    """Where a line's stages stood."""

    free: tuple[float, ...]
    busy: tuple[float, ...]


class Line:
    """The verifier's stages in a row: first in, first out."""

    def __init__(self, stages: int, hop: float) -> None:
        self.free, self.busy, self.hop = [0.0] * stages, [0.0] * stages, hop

    def run(self, ready: float, passing: Sequence[float]) -> list[float]:
        """When each stage is done with a batch that is ready then, in ms; last its verdict."""
        done = []
        for p, ms in enumerate(passing):
            self.free[p] = max(ready, self.free[p]) + ms
            self.busy[p] += ms
            done.append(self.free[p])
            ready = self.free[p] + self.hop
        return done

    def mark(self) -> Mark:
        """To measure from here."""
        return Mark(tuple(self.free), tuple(self.busy))

    def shares(self, since: Mark) -> tuple[float, ...]:
        """Each stage's busy share, between its own last moments then and now."""
        return tuple(
            (busy - was) / (free - begun)
            for free, busy, begun, was in zip(
                self.free, self.busy, since.free, since.busy, strict=True
            )
        )
