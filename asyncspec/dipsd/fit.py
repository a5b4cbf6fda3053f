"""Fits users to batches for a period that is given: fast enough for many users and many tries.

With the period fixed, what a user brings in a batch depends on that batch's size and longest draft
only, so all moves and swaps there are weighed at once. The best ones that do not touch each other
are taken until none helps. What the verifier would have to do costs ``price`` tokens a FLOP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncspec.dipsd.neighbours import exchanged
from asyncspec.dipsd.plan import Groups
from asyncspec.dipsd.tables import Tables
from asyncspec.dipsd.work import Work

LATE = 2
"""Times all tokens there are is lost by a user who is late even with one drafted token: finite, so
that leaving is a gain."""

CLOSE = 1e-9
"""Tokens that count as no gain."""

CHECKED = 4
"""Changes looked at in a step, times the batches: a gain that a prefix spoils is not one."""

Values = NDArray[np.float64]


class Change(NamedTuple):
    """``m`` goes from batch ``left`` to ``right``, ``other`` the other way where it is not None."""

    m: int
    other: int | None
    left: int
    right: int


class Fit:
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

    def climb(self, groups: Groups, period: float, price: float, work: Work) -> Groups:
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
            reach[max(0, tables.reach(size)) :] = 0
            values = self.gain[self.people, reach]
            self._values[prefix, size] = values
        return values


class _Gains:
    """What every move and every swap would bring, in tokens. Arrays have L first, users last."""

    def __init__(self, fit: Fit, groups: Groups, price: float) -> None:
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

    def changes(self) -> Iterator[Change]:
        """Those that seem to help, the best first; not all of them where there are very many."""
        moves, swaps = self._moves(), self._swaps()
        gains = np.concatenate((moves.ravel(), swaps.ravel()))
        better = np.flatnonzero(gains > CLOSE)
        order = better[np.argsort(-gains[better], kind="stable")]
        count = len(self.people)
        for i in order[: CHECKED * len(self.groups)].tolist():
            batch, m = divmod(i, count)
            if batch < len(self.groups):
                yield Change(m, None, int(self.owner[m]), batch)
            else:
                one = batch - len(self.groups)
                left, right = int(self.owner[one]), int(self.owner[m])
                yield Change(one, m, left, right)

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
