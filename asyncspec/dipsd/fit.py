"""Fits users to batches for a period that is given: fast enough for many users and many tries.

With the period fixed, what a user brings in a batch depends on that batch's size and longest draft
only, so all moves and swaps between two batches are weighed at once. The best one is taken until
none helps. What the verifier would have to do costs ``price`` tokens a FLOP.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from asyncspec.dipsd.neighbours import exchanged
from asyncspec.dipsd.plan import Groups
from asyncspec.dipsd.tables import Tables

NEVER = -1e9
"""Tokens of a user who is late even with one drafted token: finite, so that leaving is a gain."""

CLOSE = 1e-9
"""Tokens that count as no gain."""

Values = NDArray[np.float64]
Option = tuple[float, tuple[tuple[int, ...], tuple[int, ...]]]
"""Tokens gained, and the two batches as they would be."""


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
        self._pairs: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Option]] = {}

    def climb(self, groups: Groups) -> Groups:
        """Steps until no move or swap helps."""
        while (better := self._step(groups)) is not None:
            groups = better
        return groups

    def _step(self, groups: Groups) -> Groups | None:
        options = []
        for left, right in combinations(range(len(groups)), 2):
            for gain, pair in self._options(groups[left], groups[right]):
                if gain > CLOSE:
                    options.append((gain, left, right, pair))
        options.sort(key=lambda option: -option[0])
        now = self._worth(groups)
        # A change of the longest prefix is not seen in a gain, so what looks best is checked.
        for _, left, right, pair in options:
            other = list(groups)
            other[left], other[right] = pair
            if self.tables.all_fit(pair) and self._worth(other) > now + CLOSE:
                return tuple(other)
        return None

    def _worth(self, groups: Sequence[tuple[int, ...]]) -> float:
        return float(sum(self._sum(group, len(group)).max() for group in groups))

    def _options(self, left: tuple[int, ...], right: tuple[int, ...]) -> list[Option]:
        """The best swap and the best move either way; most pairs are as they were a step ago."""
        found = self._pairs.get((left, right))
        if found is None:
            found = [self._best_swap(left, right)]
            if len(left) > 1:
                found.append(self._best_move(left, right))
            if len(right) > 1:
                gain, (source, target) = self._best_move(right, left)
                found.append((gain, (target, source)))
            self._pairs[left, right] = found
        return found

    def _best_swap(self, left: tuple[int, ...], right: tuple[int, ...]) -> Option:
        here, there = list(left), list(right)
        a, b = self._of(left, len(left)), self._of(right, len(right))
        sum_a, sum_b = self._sum(left, len(left)), self._sum(right, len(right))
        # By L, who leaves the left batch, who leaves the right one.
        in_a = (sum_a - a[here]).T[:, :, None] + a[there].T[:, None, :]
        in_b = (sum_b - b[there]).T[:, None, :] + b[here].T[:, :, None]
        gain = in_a.max(axis=0) + in_b.max(axis=0) - sum_a.max() - sum_b.max()
        i, j = divmod(int(gain.argmax()), len(there))
        pair = (exchanged(left, here[i], there[j]), exchanged(right, there[j], here[i]))
        return float(gain[i, j]), pair

    def _best_move(self, source: tuple[int, ...], target: tuple[int, ...]) -> Option:
        here = list(source)
        fewer, more = len(source) - 1, len(target) + 1
        left = self._sum(source, fewer) - self._of(source, fewer)[here]
        grown = self._sum(target, more) + self._of(target, more)[here]
        before = self._sum(source, len(source)).max() + self._sum(target, len(target)).max()
        gain = left.max(axis=1) + grown.max(axis=1) - before
        i = int(gain.argmax())
        pair = (exchanged(source, here[i], None), exchanged(target, None, here[i]))
        return float(gain[i]), pair

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
