"""Local search for the plan with a given number of batches.

From every start: the exact lengths give a period; at that one, and at others between the shortest
possible and the longest that could still win, users are fitted to batches (``BatchFit``); exact
lengths again. The best result is perturbed (some users change places, the period is another) and
fitted once more, many times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncspec.core.rng import uniform
from asyncspec.dipsd.association import exchanged, starts
from asyncspec.dipsd.lengths import best_lengths
from asyncspec.dipsd.model import FIRST_LENGTH, Groups, Plan, plan_of
from asyncspec.dipsd.tables import Budget, Tables

LATE = 2
"""Times all tokens there are is lost by a user who is late even with one drafted token: finite, so
that leaving is a gain."""

CLOSE = 1e-9
"""Tokens that count as no gain."""

CHECKED = 4
"""Changes looked at in a step, times the batches: a gain that a prefix spoils is not one."""

Values = NDArray[np.float64]


class BatchChange(NamedTuple):
    """``m`` goes from batch ``left`` to ``right``, ``other`` the other way where it is not None."""

    m: int
    other: int | None
    left: int
    right: int


class BatchFit:
    """The tables, and what they are at the last ``period``."""

    def __init__(self, tables: Tables) -> None:
        self.tables, self.period = tables, 0.0
        self.gain = np.array(tables.gain)
        self.gain[:, 0] = -LATE * self.gain[:, -1].sum()
        self.mixed = len(set(tables.prefix)) > 1
        self.draft = np.array(tables.draft)[:, 1:]
        self.lengths = np.arange(1, tables.longest + 1)
        self.people = np.arange(tables.users)
        self._values: dict[tuple[int, int], Values] = {}

    def climb(self, groups: Groups, period: float, price: float, work: Budget) -> Groups:
        """Steps until no move or swap helps, or the work is done."""
        if period != self.period:
            self.period = period
            self._values.clear()
        step = _step_work(self.tables, groups)
        while work.spend(step):
            better = self._step(groups, price)
            if better is None:
                break
            groups = better
        return groups

    def _step(self, groups: Groups, price: float) -> Groups | None:
        changed: dict[int, tuple[int, ...]] = {}
        for change in _Gains(self, groups, price).changes():
            left, right = change.left, change.right
            if left in changed or right in changed:
                continue
            pair = (
                exchanged(groups[left], change.m, change.other),
                exchanged(groups[right], change.other, change.m),
            )
            if self.tables.all_fit(pair) and self._helps(groups[left], groups[right], pair, price):
                changed[left], changed[right] = pair
        if not changed:
            return None
        return tuple(changed.get(n, group) for n, group in enumerate(groups))

    def _helps(
        self,
        left: tuple[int, ...],
        right: tuple[int, ...],
        pair: tuple[tuple[int, ...], tuple[int, ...]],
        price: float,
    ) -> bool:
        """A change of the longest prefix is not seen in a gain, so what looks best is checked."""
        if not self.mixed:
            return True
        before = self.worth(left, price) + self.worth(right, price)
        return self.worth(pair[0], price) + self.worth(pair[1], price) > before + CLOSE

    def worth(self, group: tuple[int, ...], price: float) -> float:
        """Tokens of one batch, less the price of its work."""
        prefix, size = max(self.tables.prefix[m] for m in group), len(group)
        tokens = self.of(prefix, size)[:, list(group)].sum(axis=1)
        return float((tokens - price * size * self.rows(prefix)).max())

    def rows(self, prefix: int) -> Values:
        """FLOPs of one user by L."""
        return np.array(self.tables.row(prefix)[1:])

    def of(self, prefix: int, size: int) -> Values:
        """Tokens by L and user (all of them) in a batch of that size and longest prefix."""
        values = self._values.get((prefix, size))
        if values is None:
            tables = self.tables
            late = self.period - (tables.slope * size * self.rows(prefix) + tables.through)
            ready = (self.draft[None] <= late[:, None, None]).sum(axis=2)
            reach = np.minimum(ready, self.lengths[:, None])
            # What does not fit in a pass is as bad as being late.
            reach[max(0, tables.longest_in(size)) :] = 0
            values = self.gain[self.people, reach]
            self._values[prefix, size] = values
        return values


class _Gains:
    """What every move and every swap would bring, in tokens. Arrays have L first, users last."""

    def __init__(self, fit: BatchFit, groups: Groups, price: float) -> None:
        self.groups = groups
        prefixes = [max(fit.tables.prefix[m] for m in group) for group in groups]
        self.sizes = np.array([len(group) for group in groups])
        self.rows = price * np.stack([fit.rows(prefix) for prefix in prefixes], axis=1)
        # The users by batch, and where each batch begins among them.
        self.by_batch = np.array([m for group in groups for m in group])
        self.starts = np.concatenate(([0], np.cumsum(self.sizes)[:-1]))
        self.people = fit.people
        self.owner = np.empty_like(self.people)
        self.owner[self.by_batch] = np.repeat(np.arange(len(groups)), self.sizes)
        stacks = [
            np.stack(
                [
                    fit.of(prefix, max(1, len(group) + more))
                    for prefix, group in zip(prefixes, groups, strict=True)
                ],
                axis=1,
            )
            for more in (-1, 0, 1)
        ]
        self.fewer, self.same, self.more = stacks
        self.now = self._sums(self.same, 0).max(axis=0)

    def changes(self) -> Iterator[BatchChange]:
        """Those that seem to help, the best first; not all of them where there are very many."""
        moves, swaps = self._moves(), self._swaps()
        gains = np.concatenate((moves.ravel(), swaps.ravel()))
        better = np.flatnonzero(gains > CLOSE)
        order = better[np.argsort(-gains[better], kind="stable")]
        count = len(self.people)
        for i in order[: CHECKED * len(self.groups)].tolist():
            batch, m = divmod(i, count)
            if batch < len(self.groups):
                yield BatchChange(m, None, int(self.owner[m]), batch)
            else:
                one = batch - len(self.groups)
                left, right = int(self.owner[one]), int(self.owner[m])
                yield BatchChange(one, m, left, right)

    def _own(self, values: Values) -> Values:
        """(L, user): what each brings in his own batch."""
        return values[:, self.owner, self.people]

    def _sums(self, values: Values, more: int) -> Values:
        """(L, batch): worth of the members, as if there were so many more of them."""
        tokens = np.add.reduceat(self._own(values)[:, self.by_batch], self.starts, axis=1)
        worth: Values = tokens - (self.sizes + more) * self.rows
        return worth

    def _moves(self) -> Values:
        """(batch, user): the user goes there."""
        left = (self._sums(self.fewer, -1)[:, self.owner] - self._own(self.fewer)).max(axis=0)
        grown = (self._sums(self.more, 1)[:, :, None] + self.more).max(axis=0)
        gains: Values = grown - self.now[:, None] + (left - self.now[self.owner])
        gains[:, self.sizes[self.owner] == 1] = -np.inf
        gains[self.owner, self.people] = -np.inf
        return gains

    def _swaps(self) -> Values:
        """(user, user): they change places; each pair once."""
        without = self._sums(self.same, 0)[:, self.owner] - self._own(self.same)
        taken = (without[:, :, None] + self.same[:, self.owner]).max(axis=0)
        gains = taken + taken.T - self.now[self.owner][:, None] - self.now[self.owner]
        once = np.triu(self.owner[:, None] != self.owner)
        each: Values = np.where(once, gains, -np.inf)
        return each


def _step_work(tables: Tables, groups: Sequence[Sequence[int]]) -> int:
    """Units of one step: the calls, and a user in the place of every other for every length."""
    return 400 + tables.users * (tables.users + 2 * len(groups)) * tables.longest // 80


TRIES = 8
"""Starts, and periods tried beside each start's own; half of each for a crowd."""

CROWD = 16

FIRST_TRIES = 2
"""Of both in an outline."""

KICKS = 1000
"""Kicks times the users: a fit's price grows with them."""


class Search:
    """``ratio`` in tokens a ms, by the two terms of the period; only what is above it is a
    ``plan``."""

    def __init__(self, tables: Tables, batches: int, above: float) -> None:
        # Here, because numpy takes longer to import than most commands run.

        self.fit = BatchFit(tables)
        self.tables, self.batches, self.ratio = tables, batches, above
        self.kicks = KICKS // tables.users
        self.steepest = max(tables.slopes)
        self.tries = TRIES if tables.users <= CROWD else TRIES // 2
        self.best: Groups | None = None
        self.plan: Plan | None = None
        self.period = 0.0
        self.tried: set[frozenset[tuple[int, ...]]] = set()

    def outline(self, work: Budget) -> None:
        """A first impression: few starts and periods."""
        self._scan(FIRST_TRIES, work)

    def deepen(self, work: Budget, above: float) -> None:
        """All of it, for a plan above ``above``: what is no better then is none."""
        if above > self.ratio:
            self.ratio, self.plan = above, None
        self._scan(self.tries, work)
        self._settle(work)
        self._kick(work)

    def _scan(self, tries: int, work: Budget) -> None:
        for groups in islice(starts(self.tables, self.batches, FIRST_LENGTH), tries):
            self._try(groups, work)
            for period in self._periods(tries):
                self._fit(groups, period, work)
            self._settle(work)

    def _try(self, groups: Groups, work: Budget) -> bool:
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

    def _fit(self, groups: Groups, period: float, work: Budget) -> bool:
        """Without and with a price on the verifier's work: drafting limits, or it does."""
        if work.left <= 0:
            return False
        prices = (0.0, self.ratio * self.steepest)
        fitted = (self.fit.climb(groups, period, price, work) for price in prices)
        better = [self._try(other, work) for other in fitted]
        return any(better)

    def _settle(self, work: Budget) -> None:
        """Batches by the period, the period by the batches, until nothing improves."""
        while self.best is not None and self._fit(self.best, self.period, work):
            pass

    def _kick(self, work: Budget) -> None:
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
