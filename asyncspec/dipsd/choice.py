"""One draft length a batch where the verifier limits: a small knapsack, by depth-first search.

It is rarely needed: only where the verifier is nearly, but not quite, what sets the period. With
very many batches it may not end, so its steps are counted.
"""

from __future__ import annotations

from typing import NamedTuple

from asyncspec.dipsd.tables import Tables
from asyncspec.dipsd.work import Work

SHARES = (0.0, 0.5, 1.0)
"""Of the period's price that bounds put on the work."""

NODE = 3
"""Units of work of a node of the search."""


class Found(NamedTuple):
    """``value`` is U - q S in tokens; ``longest`` is L by batch."""

    value: float
    tokens: float
    period: float
    longest: tuple[int, ...]


class Choice:
    """One option a batch, to maximise the sum of tokens - q max(period, server(sum of FLOPs)).

    Depth first, with bounds that take each batch by itself: a share of the period's price is put
    on the work (of the steepest stage), the rest stays with the period.
    """

    def __init__(
        self,
        tables: Tables,
        options: list[list[tuple[float, float, int]]],
        q: float,
        period: float,
        work: Work,
    ) -> None:
        self.tables, self.q, self.period, self.work = tables, q, period, work
        work.spend(len(SHARES) * len(tables.slopes) * sum(map(len, options)) // 5)
        self.options = [sorted(row, reverse=True) for row in options]
        self.bounds = [self._bound(share, p) for p in range(len(tables.slopes)) for share in SHARES]

    def _bound(self, share: float, stage: int) -> tuple[float, float, list[float]]:
        """(price of a FLOP, constant, the most that the batches from n on can add)."""
        tables, q = self.tables, self.q
        price = share * q * tables.slopes[stage]
        constant = q * (share * tables.fixed[stage] * len(self.options) + (1 - share) * self.period)
        rest = [0.0]
        for row in reversed(self.options):
            rest.append(rest[-1] + max(v - price * w for v, w, _ in row))
        return price, constant, rest[::-1]

    def best(self, floor: float) -> Found | None:
        """The best above ``floor``, or what is found of it before the work is done."""
        self.floor, self.found = floor, None
        self._descend(0, 0.0, 0.0, ())
        return self.found

    found: Found | None
    floor: float

    def _descend(self, n: int, tokens: float, flops: float, chosen: tuple[int, ...]) -> None:
        if not self.work.spend(NODE):
            return
        if any(tokens - p * flops - c + rest[n] <= self.floor for p, c, rest in self.bounds):
            return
        if n == len(self.options):
            period = max(self.period, self.tables.server(flops, n))
            value = tokens - self.q * period
            if value > self.floor:
                self.floor, self.found = value, Found(value, tokens, period, chosen)
            return
        for more, costs, longest in self.options[n]:
            self._descend(n + 1, tokens + more, flops + costs, (*chosen, longest))
