"""Fits users to batches for a period that is given: fast enough for many users and many tries.

With the period fixed, what a user brings in a batch depends on that batch's size and longest draft
only, so all moves and swaps between two batches are weighed at once. The best one is taken until
none helps. What the verifier would have to do costs ``price`` tokens a FLOP.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from asyncspec.dipsd.neighbours import moved, swapped
from asyncspec.dipsd.plan import Groups
from asyncspec.dipsd.tables import Tables

NEVER = -1e9
"""Tokens of a user who is late even with one drafted token: finite, so that leaving is a gain."""

Values = NDArray[np.float64]


class Fit:
    """The period's part of the tables."""

    def __init__(self, tables: Tables, period: float, price: float) -> None:
        self.tables, self.period, self.price = tables, period, price
        self.gain = np.array(tables.gain)
        self.gain[:, 0] = NEVER
        self.draft = np.array(tables.draft)
        self.lengths = np.arange(1, tables.longest + 1)
        self.people = np.arange(tables.users)
        self._values: dict[tuple[int, int], Values] = {}

    def climb(self, groups: Groups) -> Groups:
        """Steps until no move or swap helps."""
        while (better := self._step(groups)) is not None:
            groups = better
        return groups

    def _step(self, groups: Groups) -> Groups | None:
        options = []
        for left, right in combinations(range(len(groups)), 2):
            options.append(self._best_swap(groups, left, right))
            options.append(self._best_move(groups, left, right))
            options.append(self._best_move(groups, right, left))
        options.sort(key=lambda option: -option[0])
        now = self._worth(groups)
        # A change of the longest prefix is not seen above, so what looks best is checked.
        for gain, other in options:
            if gain <= 1e-9:
                return None
            if self.tables.all_fit(other) and self._worth(other) > now + 1e-9:
                return other
        return None

    def _worth(self, groups: Groups) -> float:
        return float(sum(self._sum(group, len(group)).max() for group in groups))

    def _best_swap(self, groups: Groups, left: int, right: int) -> tuple[float, Groups]:
        here, there = list(groups[left]), list(groups[right])
        a, b = self._of(groups[left], len(here)), self._of(groups[right], len(there))
        sum_a, sum_b = self._sum(groups[left], len(here)), self._sum(groups[right], len(there))
        # By L, who leaves the left batch, who leaves the right one.
        in_a = (sum_a - a[here]).T[:, :, None] + a[there].T[:, None, :]
        in_b = (sum_b - b[there]).T[:, None, :] + b[here].T[:, :, None]
        gain = in_a.max(axis=0) + in_b.max(axis=0) - sum_a.max() - sum_b.max()
        i, j = divmod(int(gain.argmax()), len(there))
        return float(gain[i, j]), swapped(groups, here[i], left, there[j], right)

    def _best_move(self, groups: Groups, source: int, target: int) -> tuple[float, Groups]:
        here = list(groups[source])
        if len(here) == 1:
            return NEVER, groups
        a = self._of(groups[source], len(here) - 1)
        b = self._of(groups[target], len(groups[target]) + 1)
        left = self._sum(groups[source], len(here) - 1) - a[here]
        grown = self._sum(groups[target], len(groups[target]) + 1) + b[here]
        before = self._sum(groups[source], len(here)).max()
        before += self._sum(groups[target], len(groups[target])).max()
        gain = left.max(axis=1) + grown.max(axis=1) - before
        i = int(gain.argmax())
        return float(gain[i]), moved(groups, here[i], source, target)

    def _sum(self, group: tuple[int, ...], size: int) -> Values:
        """Worth of a batch by L, as if it had ``size`` users."""
        tables = self.tables
        work = np.array(tables.row(max(tables.prefix[m] for m in group))[1:]) * size
        total: Values = self._of(group, size)[list(group)].sum(axis=0) - self.price * work
        return total

    def _of(self, group: tuple[int, ...], size: int) -> Values:
        """Tokens by user (all of them) and L in a batch of that size and this group's prefix."""
        prefix = max(self.tables.prefix[m] for m in group)
        values = self._values.get((prefix, size))
        if values is None:
            row = self.tables.row(prefix)
            late = [self.period - self.tables.passing(size * row[k]) for k in self.lengths]
            ready = np.stack([(self.draft[:, 1:] <= ms).sum(axis=1) for ms in late], axis=1)
            reach = np.minimum(ready, self.lengths)
            values = self.gain[self.people[:, None], reach]
            self._values[prefix, size] = values
        return values
