"""Event-by-event simulation of plans and of greedy batching, with jitter and misjudged users."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from asyncspec.core.rng import uniform
from asyncspec.dipsd.model import Plan
from asyncspec.dipsd.tables import Tables, expected_tokens


def drawn_tokens(alpha: float, length: int, seed: int, round_: int, user: int) -> int:
    """One round's tokens, drawn as a function of (seed, round, user); its mean is u(l)."""
    accepted = 0
    while accepted < length and uniform(seed + user, round_, accepted) < alpha:
        accepted += 1
    return accepted + 1


DRAFT, LINK, VERIFY = 1, 2, 3


class Deviations(Struct, frozen=True):
    """Relative deviations as measured: of drafts and of links by user, of passes by stage."""

    drafts: tuple[float, ...]
    links: tuple[float, ...]
    passes: tuple[float, ...]


class Noise(Struct, frozen=True):
    """Durations are lognormal with mean as planned; ``sigma`` 0 is a perfect machine.

    ``alphas`` by user are the true ones, if the deployment's are only estimates. ``expected``
    counts the mean of a round's tokens in place of drawing them. ``deviations`` take the place of
    ``sigma`` where they differ by what it is and whose.
    """

    sigma: float = 0.0
    seed: int = 0
    alphas: tuple[float, ...] | None = None
    expected: bool = False
    deviations: Deviations | None = None

    @property
    def quiet(self) -> bool:
        """Whether everything takes as long as planned."""
        whose = self.deviations
        if whose is None:
            return not self.sigma
        return not any((*whose.drafts, *whose.links, *whose.passes))

    def sigma_of(self, kind: int, whose: int) -> float:
        """The deviation of a user's drafts or links, or of a stage's passes."""
        if self.deviations is None:
            return self.sigma
        tables = (self.deviations.drafts, self.deviations.links, self.deviations.passes)
        return tables[kind - DRAFT][whose]

    def factor(self, kind: int, who: int, round_: int, sigma: float | None = None) -> float:
        """The factor on one duration, by what it is, whose and in which round."""
        sigma = self.sigma if sigma is None else sigma
        if not sigma:
            return 1.0
        key = self.seed * 4 + kind
        radius = math.sqrt(-2.0 * math.log(uniform(key, round_, 2 * who)))
        normal = radius * math.cos(2.0 * math.pi * uniform(key, round_, 2 * who + 1))
        return math.exp(sigma * normal - 0.5 * sigma**2)


QUIET = Noise()
"""Machines that are as planned."""


class Simulated(Struct, frozen=True):
    """Averages after a start-up: tokens a second, ms a cycle (or a pass), stages' busy shares."""

    throughput: float
    period_ms: float
    busy: tuple[float, ...]
    # Tokens a second of each user.
    by_user: tuple[float, ...] = ()


class Durations:
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


class LineMark(NamedTuple):
    """Where a line's stages stood."""

    free: tuple[float, ...]
    busy: tuple[float, ...]


class VerifierLine:
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

    def mark(self) -> LineMark:
        """To measure from here."""
        return LineMark(tuple(self.free), tuple(self.busy))

    def shares(self, since: LineMark) -> tuple[float, ...]:
        """Each stage's busy share, between its own last moments then and now."""
        return tuple(
            (busy - was) / (free - begun)
            for free, busy, begun, was in zip(
                self.free, self.busy, since.free, since.busy, strict=True
            )
        )


def simulate_plan(plan: Plan, tables: Tables, rounds: int, noise: Noise = QUIET) -> Simulated:
    """``rounds`` cycles in the plan's order: an unready batch makes the verifier wait.

    The first half is the start-up; ``period_ms`` is what the rest took by its cycles. At least 2.
    """
    players = Durations(tables, noise)
    line = VerifierLine(len(tables.fixed), tables.deployment.verifier.hop_ms)
    begun = rounds // 2
    ready = [
        max(players.drafting(m, k, 0) for m, k in zip(b.users, b.lengths, strict=True))
        for b in plan.batches
    ]
    start, before, tokens = 0.0, line.mark(), [0.0] * tables.users
    verdict = 0.0
    for round_ in range(rounds):
        for n, batch in enumerate(plan.batches):
            pairs = list(zip(batch.users, batch.lengths, strict=True))
            passing = players.passing(batch.users, max(batch.lengths), round_)
            verdict = line.run(ready[n], passing)[-1]
            ready[n] = verdict + max(players.drafting(m, k, round_ + 1) for m, k in pairs)
            if round_ >= begun:
                for m, k in pairs:
                    tokens[m] += players.tokens(m, k, round_)
        if round_ == begun - 1:
            start, before = verdict, line.mark()
    took = verdict - start
    rates = tuple(1000 * count / took for count in tokens)
    return Simulated(sum(rates), took / (rounds - begun), line.shares(before), rates)


def simulate_greedy(
    tables: Tables, lengths: Sequence[int], rounds: int, noise: Noise = QUIET
) -> Simulated:
    """Until ``rounds`` rounds a user have been verified, by the sum; the first half is start-up."""
    players = Durations(tables, noise)
    line = VerifierLine(len(tables.fixed), tables.deployment.verifier.hop_ms)
    done = [0] * tables.users
    waiting = sorted((players.drafting(m, lengths[m], 0), m) for m in range(tables.users))
    total, begun = rounds * tables.users, rounds // 2 * tables.users
    start, before, verified, passes = 0.0, line.mark(), 0, 0
    tokens = [0.0] * tables.users
    verdict = 0.0
    while verified < total:
        now = max(line.free[0], waiting[0][0])
        taken = _taken(tables, lengths, waiting, now)
        waiting = [one for one in waiting if one[1] not in taken]
        longest = max(lengths[m] for m in taken)
        verdict = line.run(now, players.passing(taken, longest, done[taken[0]]))[-1]
        counted = verified >= begun
        for m in taken:
            tokens[m] += players.tokens(m, lengths[m], done[m]) if counted else 0.0
            done[m] += 1
            waiting.append((verdict + players.drafting(m, lengths[m], done[m]), m))
        waiting.sort()
        verified, passes = verified + len(taken), passes + counted
        if not counted:
            start, before = verdict, line.mark()
    took = verdict - start
    rates = tuple(1000 * count / took for count in tokens)
    return Simulated(sum(rates), took / passes, line.shares(before), rates)


def _taken(
    tables: Tables, lengths: Sequence[int], waiting: Sequence[tuple[float, int]], now: float
) -> list[int]:
    """Who is ready by now, oldest first, as many as fit; at least one. Where somebody's rows do not
    a later one's may."""
    most = tables.batch_rows or math.inf
    taken: list[int] = []
    rows = 0
    for ready, m in waiting:
        if ready > now or (taken and not tables.fits([*taken, m])):
            break
        if not taken or rows + lengths[m] + 1 <= most:
            taken.append(m)
            rows += lengths[m] + 1
    return taken


def best_greedy(tables: Tables, rounds: int = 40) -> tuple[int, Simulated]:
    """(length, run): the best draft length that all users share, without jitter."""
    quiet = Noise(expected=True)
    runs = (
        (k, simulate_greedy(tables, [k] * tables.users, rounds, quiet))
        for k in range(1, tables.longest + 1)
    )
    return max(runs, key=lambda run: run[1].throughput)
