"""Event-by-event simulation of plans and of greedy batching, with jitter and misjudged users."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from msgspec import Struct

from asyncspec.core.rng import uniform
from asyncspec.plugins.dipsd.evaluate import VerifierLine
from asyncspec.plugins.dipsd.model import Plan, Tables, expected_tokens


def drawn_tokens(alpha: float, length: int, seed: int, round_: int, user: int) -> int:
    """One round's tokens, drawn as a function of (seed, round, user); its mean is u(l)."""
    accepted = 0
    while accepted < length and uniform(seed + user, round_, accepted) < alpha:
        accepted += 1
    return accepted + 1


DRAFT, LINK, VERIFY = 0, 1, 2
"""Kinds of durations: ``Deviations`` has them in this order."""


class Deviations(NamedTuple):
    """Relative deviations as measured: of drafts and of links by user, of passes by stage."""

    drafts: tuple[float, ...] = ()
    links: tuple[float, ...] = ()
    passes: tuple[float, ...] = ()


class Noise(Struct, frozen=True):
    """Durations are lognormal with mean as planned; ``sigma`` 0 is a perfect machine.

    ``alphas`` by user are the true ones, if the deployment's are only estimates. ``expected``
    counts the mean of a round's tokens in place of drawing them. ``deviations`` take the place of
    ``sigma`` where they differ by user or stage.
    """

    sigma: float = 0.0
    seed: int = 0
    alphas: tuple[float, ...] | None = None
    expected: bool = False
    deviations: Deviations | None = None

    @property
    def quiet(self) -> bool:
        """Whether everything takes as long as planned."""
        return not (self.sigma if self.deviations is None else any(map(any, self.deviations)))

    def factor(self, kind: int, whose: int, round_: int, offset: int = 0) -> float:
        """Factor on a user's or a stage's duration in a round; ``offset`` tells several apart."""
        sigma = self.sigma if self.deviations is None else self.deviations[kind][whose]
        if not sigma:
            return 1.0
        normal = _normal(self.seed * 4 + kind + 1, round_, 2 * (whose + offset))
        return math.exp(sigma * normal - 0.5 * sigma**2)


@lru_cache(1 << 14)
def _normal(key: int, round_: int, counter: int) -> float:
    """A standard normal number. Plans are compared by the same ones (Box and Muller)."""
    radius = math.sqrt(-2.0 * math.log(uniform(key, round_, counter)))
    return radius * math.cos(2.0 * math.pi * uniform(key, round_, counter + 1))


QUIET = Noise()
"""Machines that are as planned."""


class Simulated(Struct, frozen=True):
    """Averages after a start-up: tokens a second, ms a cycle (or a pass), stages' busy shares."""

    throughput: float
    period_ms: float
    busy: tuple[float, ...]
    # Tokens a second of each user.
    by_user: tuple[float, ...] = ()


class _Run:
    """Drafting users and a verifying line. Times in ms, by user where not said otherwise."""

    def __init__(self, tables: Tables, lengths: Sequence[int], noise: Noise) -> None:
        self.tables, self.lengths, self.noise = tables, lengths, noise
        users = tables.deployment.users
        self.alphas = noise.alphas or tuple(user.alpha for user in users)
        self.line = VerifierLine(len(tables.fixed), tables.deployment.verifier.hop_ms)
        # Rounds that were verified, and when the next draft arrives; the last pass's verdict.
        self.rounds, self.verdict = [0] * tables.users, 0.0
        self.ready = [self._drafting(m, 0) for m in range(tables.users)]
        self.count()

    def _drafting(self, m: int, round_: int) -> float:
        """Milliseconds from a verdict to the next draft's arrival."""
        link, whole = self.tables.deployment.users[m].link_ms, self.tables.draft[m][self.lengths[m]]
        drafted = (whole - link) * self.noise.factor(DRAFT, m, round_)
        return drafted + link * self.noise.factor(LINK, m, round_)

    def verify(self, users: Sequence[int]) -> None:
        """A pass of these users, as soon as all of them are ready."""
        work = self.tables.batch_work(users, self.lengths)
        round_, offset = self.rounds[users[0]], users[0] * len(self.line.free)
        passing = [
            ms * self.noise.factor(VERIFY, p, round_, offset)
            for p, ms in enumerate(self.tables.stages(work))
        ]
        self.verdict = self.line.run(max(self.ready[m] for m in users), passing)[-1]
        for m in users:
            alpha, length, round_ = self.alphas[m], self.lengths[m], self.rounds[m]
            if self.noise.expected:
                self.tokens[m] += expected_tokens(alpha, length)
            else:
                self.tokens[m] += drawn_tokens(alpha, length, self.noise.seed, round_, m)
            self.rounds[m] += 1
            self.ready[m] = self.verdict + self._drafting(m, round_ + 1)

    def count(self) -> None:
        """Count tokens and the stages' busy time from now on."""
        self.tokens = [0.0] * self.tables.users
        self.start, self.before = self.verdict, (self.line.free[:], self.line.busy[:])

    def averages(self, periods: int) -> Simulated:
        """Since ``count``, over so many cycles or passes."""
        took = self.verdict - self.start
        rates = tuple(1000 * count / took for count in self.tokens)
        stages = zip(self.line.free, self.line.busy, *self.before, strict=True)
        shares = tuple((busy - was) / (free - start) for free, busy, start, was in stages)
        return Simulated(sum(rates), took / periods, shares, rates)


def simulate_plan(plan: Plan, tables: Tables, rounds: int, noise: Noise = QUIET) -> Simulated:
    """``rounds`` cycles in the plan's order: an unready batch makes the verifier wait.

    The first half is the start-up; ``period_ms`` is what the rest took by its cycles. At least 2.
    """
    run = _Run(tables, plan.lengths, noise)
    for round_ in range(rounds):
        if round_ == rounds // 2:
            run.count()
        for users in plan.batches:
            run.verify(users)
    return run.averages(rounds - rounds // 2)


def simulate_greedy(
    tables: Tables, lengths: Sequence[int], rounds: int, noise: Noise = QUIET
) -> Simulated:
    """Until ``rounds`` rounds a user have been verified, by the sum; the first half is start-up."""
    run = _Run(tables, lengths, noise)
    passes, verified, start_up = 0, 0, rounds // 2 * tables.users
    while verified < rounds * tables.users:
        users = _taken(run)
        if verified >= start_up:
            if not passes:
                run.count()
            passes += 1
        run.verify(users)
        verified += len(users)
    return run.averages(passes)


def _taken(run: _Run) -> list[int]:
    """Users that are ready when the first stage is free, or else first: by age, as many as fit, at
    least one. A user may overtake one whose rows do not fit."""
    tables = run.tables
    max_rows = tables.deployment.batch_rows or math.inf
    waiting = sorted(zip(run.ready, range(tables.users), strict=True))
    now = max(run.line.free[0], waiting[0][0])
    taken: list[int] = []
    rows = 0
    for ready, m in waiting:
        if ready > now or (taken and not tables.fits([*taken, m])):
            break
        if not taken or rows + run.lengths[m] + 1 <= max_rows:
            taken.append(m)
            rows += run.lengths[m] + 1
    return taken


def best_greedy(tables: Tables, rounds: int = 40) -> tuple[int, Simulated]:
    """(length, run): the best draft length that all users share, without jitter."""
    quiet = Noise(expected=True)
    lengths = range(1, tables.longest + 1)
    runs = [(k, simulate_greedy(tables, [k] * tables.users, rounds, quiet)) for k in lengths]
    return max(runs, key=lambda run: run[1].throughput)
