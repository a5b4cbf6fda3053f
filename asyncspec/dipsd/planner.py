"""Our planner: one batch is a plan too, several starts, local search, and a bound that ends it.

For each batch count, from every start: the exact lengths give a period; at that period and at
others between the shortest possible and the longest that could still win, users are fitted to
batches; exact lengths again. The best of these is then improved by exact steps.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncspec.dipsd.bound import upper_bound
from asyncspec.dipsd.evaluate import evaluate_on
from asyncspec.dipsd.fit import Fit
from asyncspec.dipsd.lengths import Lengths, best_lengths
from asyncspec.dipsd.neighbours import neighbours
from asyncspec.dipsd.order import in_best_order
from asyncspec.dipsd.outcome import Planned, Scanned
from asyncspec.dipsd.plan import Groups, Plan, plan_of
from asyncspec.dipsd.presets import FIRST_LENGTH
from asyncspec.dipsd.starts import starts
from asyncspec.dipsd.tables import Tables

PERIODS = 8
"""Periods tried beside a start's own."""

POLISH = 1500
"""Exact steps weighed, for a handful of users; fewer for more, in proportion to their cost."""


def plan_best(tables: Tables) -> Planned | None:
    """The best plan found; None if no batching fits in the memory."""
    best: Plan | None = None
    ratio = 0.0
    scanned = []
    for batches in range(1, tables.users + 1):
        bound = upper_bound(tables, batches, ratio)
        if best is not None and bound <= ratio * (1 + 1e-12):
            break
        found = _Scan(tables, batches, ratio).run()
        scanned.append(Scanned(batches, 0.0, 1000 * bound))
        if found is None:
            continue
        # Above are the two terms of the period; on several stages it may be longer.
        plan = in_best_order(found, tables)
        throughput = evaluate_on(plan, tables).throughput
        scanned[-1] = Scanned(batches, throughput, 1000 * bound)
        if best is None or throughput > 1000 * ratio:
            best, ratio = plan, throughput / 1000
    return None if best is None else Planned(best, tuple(scanned))


class _Scan:
    """One batch count. ``ratio`` (tokens a ms) is what there is to beat."""

    def __init__(self, tables: Tables, batches: int, ratio: float) -> None:
        self.tables, self.batches, self.ratio = tables, batches, ratio
        self.best: tuple[Groups, Lengths] | None = None
        self.tried: set[frozenset[tuple[int, ...]]] = set()

    def run(self) -> Plan | None:
        for groups in starts(self.tables, self.batches, FIRST_LENGTH):
            self._try(groups)
            if 1 < self.batches < self.tables.users:
                self._fit(groups)
        if self.best is not None and 1 < self.batches < self.tables.users:
            self._polish()
        return None if self.best is None else plan_of(self.best[0], self.best[1].by_user)

    def _try(self, groups: Groups) -> bool:
        name = frozenset(groups)
        if name in self.tried:
            return False
        self.tried.add(name)
        found = best_lengths(self.tables, groups, self.ratio)
        if found is None:
            return False
        self.best, self.ratio = (groups, found), found.ratio
        return True

    def _fit(self, groups: Groups) -> None:
        steep = max(self.tables.slopes)
        for period in self._periods():
            for price in (0.0, self.ratio * steep):
                self._try(Fit(self.tables, period, price).climb(groups))
        while self.best is not None:
            plan = plan_of(self.best[0], self.best[1].by_user)
            period = evaluate_on(plan, self.tables).period_ms
            climbed = (Fit(self.tables, period, p * steep).climb(self.best[0]) for p in (0.0, self.ratio))
            if not any([self._try(other) for other in climbed]):
                break

    def _periods(self) -> Iterator[float]:
        """Evenly from the shortest period there can be to the longest that could still win."""
        tables = self.tables
        least = tables.server(sum(tables.row(p)[1] for p in tables.prefix), self.batches)
        shortest = max(least, *(d[1] + tables.through for d in tables.draft))
        most = sum(gain[-1] for gain in tables.gain)
        longest = most / self.ratio if self.ratio else 4 * shortest
        for i in range(PERIODS):
            yield shortest + (longest - shortest) * i / PERIODS

    def _polish(self) -> None:
        budget = min(POLISH, POLISH * 8 * 8 // self.tables.users**2)
        better = True
        while better and budget > 0 and self.best is not None:
            better = False
            for other in neighbours(self.best[0]):
                budget -= 1
                if self._try(other):
                    better = True
                    break
                if budget <= 0:
                    break
