"""Local search for the plan with a given number of batches.

From every start: the exact lengths give a period; at that one, and at others between the shortest
possible and the longest that could still win, users are fitted to batches (``fit``); exact lengths
again. The alternation of Algorithm 1 is one of the starts. What comes out best is kicked (some
users change places, the period is another) and fitted once more, many times; then improved by exact
steps, as long as the budget lasts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from asyncspec.dipsd.algorithm1 import alternate
from asyncspec.dipsd.evaluate import evaluate_on
from asyncspec.dipsd.lengths import best_lengths
from asyncspec.dipsd.neighbours import neighbours
from asyncspec.dipsd.plan import Groups, Plan, plan_of
from asyncspec.dipsd.presets import FIRST_LENGTH
from asyncspec.dipsd.starts import starts
from asyncspec.dipsd.tables import Tables
from asyncspec.rng import uniform

TRIES = 8
"""Starts, and periods tried beside each start's own; half of each for a crowd."""

CROWD = 16

NODES = 2000
"""Of each association step in the alternation."""

KICKS = 1000
"""Kicks times the users: a fit's price grows with them."""

STEPS = 100_000
"""Exact steps weighed, times the square of the users: a step's price grows with it."""


class Found(NamedTuple):
    """``ratio`` in tokens a ms, by the two terms of the period."""

    ratio: float
    plan: Plan


def search(tables: Tables, batches: int, above: float, effort: float = 1.0) -> Found | None:
    """The best plan found with ``batches`` batches, if above ``above`` tokens a ms."""
    return _Search(tables, batches, above, effort).run()


class _Search:
    def __init__(self, tables: Tables, batches: int, above: float, effort: float) -> None:
        self.tables, self.batches, self.ratio = tables, batches, above
        self.kicks = int(effort * KICKS) // tables.users
        self.steps = int(effort * STEPS) // tables.users**2
        self.steepest = max(tables.slopes)
        self.tries = TRIES if tables.users <= CROWD else TRIES // 2
        self.best: Groups | None = None
        self.plan: Plan | None = None
        self.tried: set[frozenset[tuple[int, ...]]] = set()

    def run(self) -> Found | None:
        for groups in islice(starts(self.tables, self.batches, FIRST_LENGTH), self.tries):
            self._try(groups)
            for period in self._periods():
                self._fit(groups, period)
            self._settle()
        self._alternate()
        self._settle()
        self._kick()
        self._polish()
        return None if self.plan is None else Found(self.ratio, self.plan)

    def _try(self, groups: Groups) -> bool:
        """Whether these batches, with their exact lengths, are the best so far."""
        name = frozenset(groups)
        if name in self.tried:
            return False
        self.tried.add(name)
        found = best_lengths(self.tables, groups, self.ratio)
        if found is None:
            return False
        self.best, self.ratio = groups, found.ratio
        self.plan = plan_of(groups, found.by_user)
        return True

    def _fit(self, groups: Groups, period: float) -> bool:
        """Without and with a price on the verifier's work: drafting limits, or it does."""
        prices = (0.0, self.ratio * self.steepest)
        # Here, because numpy takes longer to import than most commands run.
        from asyncspec.dipsd.fit import Fit

        fitted = [Fit(self.tables, period, price).climb(groups) for price in prices]
        better = [self._try(other) for other in fitted]
        return any(better)

    def _settle(self) -> None:
        """Batches by the period, the period by the batches, until nothing improves."""
        while self.best is not None and self.plan is not None:
            if not self._fit(self.best, evaluate_on(self.plan, self.tables).period_ms):
                return

    def _alternate(self) -> None:
        found = alternate(self.tables, self.batches, NODES)
        if found is not None:
            self._try(found[1].groups)

    def _kick(self) -> None:
        """Always the best so far is kicked, so that what is found is a function of the tables."""
        for number in range(self.kicks):
            if self.best is None or self.plan is None:
                return
            period = evaluate_on(self.plan, self.tables).period_ms
            period *= 0.8 + 0.4 * uniform(number, 0)
            groups = _shuffled(self.best, 2 + number % 3, number)
            if self.tables.all_fit(groups) and self._fit(groups, period):
                self._settle()

    def _periods(self) -> Iterator[float]:
        """Evenly from the shortest period there can be to the longest that could still win."""
        tables = self.tables
        least = tables.server(sum(tables.row(p)[1] for p in tables.prefix), self.batches)
        shortest = max(least, *(draft[1] + tables.through for draft in tables.draft))
        most = sum(gain[-1] for gain in tables.gain)
        longest = most / self.ratio if self.ratio else 4 * shortest
        for i in range(self.tries):
            yield shortest + (longest - shortest) * (i + 0.5) / self.tries

    def _polish(self) -> None:
        budget = self.steps
        better = True
        while better and self.best is not None:
            better = False
            for other in neighbours(self.best):
                budget -= 1
                if budget < 0:
                    return
                if self._try(other):
                    better = True
                    break


def _shuffled(groups: Groups, swaps: int, number: int) -> Groups:
    """Some users have changed places with some of other batches, by chance or not at all."""
    owners = [n for n, group in enumerate(groups) for _ in group]
    people = [m for group in groups for m in group]
    for i in range(swaps):
        one, other = (int(uniform(number, i + 1, side) * len(people)) for side in (0, 1))
        people[one], people[other] = people[other], people[one]
    batches: list[list[int]] = [[] for _ in groups]
    for n, m in zip(owners, people, strict=True):
        batches[n].append(m)
    return tuple(tuple(sorted(batch)) for batch in batches)
