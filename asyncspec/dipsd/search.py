"""Local search for the plan with a given number of batches.

From every start: the exact lengths give a period; at that one, and at others between the shortest
possible and the longest that could still win, users are fitted to batches (``fit``); exact lengths
again. The alternation of Algorithm 1 is one of the starts. What comes out best is kicked (some
users change places, the period is another) and fitted once more, many times; then improved by exact
steps, as long as the work that is allowed lasts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from asyncspec.core.rng import uniform
from asyncspec.dipsd.algorithm1 import alternate
from asyncspec.dipsd.lengths import best_lengths
from asyncspec.dipsd.neighbours import neighbours
from asyncspec.dipsd.plan import Groups, Plan, plan_of
from asyncspec.dipsd.presets import FIRST_LENGTH
from asyncspec.dipsd.starts import starts
from asyncspec.dipsd.tables import Tables
from asyncspec.dipsd.work import Work

TRIES = 8
"""Starts, and periods tried beside each start's own; half of each for a crowd."""

CROWD = 16

FIRST_TRIES = 2
"""Of both in an outline."""

NODES = 2000
"""Of each association step in the alternation."""

ALTERNATING = 0.25
"""Of the work that is left: at most so much for the alternation."""

KICKS = 1000
"""Kicks times the users: a fit's price grows with them."""

STEPS = 100_000
"""Exact steps weighed, times the square of the users: a step's price grows with it."""


class Search:
    """``ratio`` in tokens a ms, by the two terms of the period; only what is above it is a
    ``plan``."""

    def __init__(self, tables: Tables, batches: int, above: float) -> None:
        # Here, because numpy takes longer to import than most commands run.
        from asyncspec.dipsd.fit import Fit

        self.fit = Fit(tables)
        self.tables, self.batches, self.ratio = tables, batches, above
        self.kicks = KICKS // tables.users
        self.steps = STEPS // tables.users**2
        self.steepest = max(tables.slopes)
        self.tries = TRIES if tables.users <= CROWD else TRIES // 2
        self.best: Groups | None = None
        self.plan: Plan | None = None
        self.period = 0.0
        self.tried: set[frozenset[tuple[int, ...]]] = set()

    def outline(self, work: Work) -> None:
        """A first impression: few starts and periods."""
        self._scan(FIRST_TRIES, work)

    def deepen(self, work: Work, above: float) -> None:
        """All of it, for a plan above ``above``: what is no better then is none."""
        if above > self.ratio:
            self.ratio, self.plan = above, None
        self._scan(self.tries, work)
        self._alternate(work)
        self._settle(work)
        self._kick(work)
        self._polish(work)

    def _scan(self, tries: int, work: Work) -> None:
        for groups in islice(starts(self.tables, self.batches, FIRST_LENGTH), tries):
            self._try(groups, work)
            for period in self._periods(tries):
                self._fit(groups, period, work)
            self._settle(work)

    def _try(self, groups: Groups, work: Work) -> bool:
        """Whether these batches, with their exact lengths, are the best so far."""
        name = frozenset(groups)
        if name in self.tried or work.left <= 0:
            return False
        self.tried.add(name)
        found = best_lengths(self.tables, groups, self.ratio, work)
        if found is None:
            return False
        self.best, self.ratio = groups, found.ratio
        self.plan = plan_of(groups, found.by_user)
        tokens = sum(self.tables.gain[m][k] for m, k in found.by_user.items())
        self.period = tokens / found.ratio
        return True

    def _fit(self, groups: Groups, period: float, work: Work) -> bool:
        """Without and with a price on the verifier's work: drafting limits, or it does."""
        if work.left <= 0:
            return False
        prices = (0.0, self.ratio * self.steepest)
        fitted = (self.fit.climb(groups, period, price, work) for price in prices)
        better = [self._try(other, work) for other in fitted]
        return any(better)

    def _settle(self, work: Work) -> None:
        """Batches by the period, the period by the batches, until nothing improves."""
        while self.best is not None and self._fit(self.best, self.period, work):
            pass

    def _alternate(self, work: Work) -> None:
        part = work.part(ALTERNATING * work.left)
        found = alternate(self.tables, self.batches, NODES, part)
        work.take_back(part)
        if found is not None:
            self._try(found[1].groups, work)

    def _kick(self, work: Work) -> None:
        """Always the best so far is kicked, so that what is found is a function of the tables."""
        for number in range(self.kicks):
            if self.best is None or self.plan is None or work.left <= 0:
                return
            period = self.period * (0.8 + 0.4 * uniform(number, 0))
            groups = _shuffled(self.best, 2 + number % 3, number)
            if self.tables.all_fit(groups) and self._fit(groups, period, work):
                self._settle(work)

    def _periods(self, tries: int) -> Iterator[float]:
        """Evenly from the shortest period there can be to the longest that could still win."""
        tables = self.tables
        least = tables.server(sum(tables.row(p)[1] for p in tables.prefix), self.batches)
        shortest = max(least, *(draft[1] + tables.through for draft in tables.draft))
        most = sum(gain[-1] for gain in tables.gain)
        longest = most / self.ratio if self.ratio else 4 * shortest
        for i in range(tries):
            yield shortest + (longest - shortest) * (i + 0.5) / tries

    def _polish(self, work: Work) -> None:
        budget = self.steps
        better = True
        while better and self.best is not None:
            better = False
            for other in neighbours(self.best):
                budget -= 1
                if budget < 0 or work.left <= 0:
                    return
                if self._try(other, work):
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
