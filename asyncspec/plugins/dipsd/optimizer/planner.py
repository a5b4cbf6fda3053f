"""The planner: batch counts, associations, draft lengths and the order of batches.

A handful of users is enumerated: every association with its exact lengths, so on one stage the plan
is the optimum. More of them are searched (``search``): first an outline of every batch count, then
the counts that look best, as long as the budget lasts. On several stages all go by the two terms of
the period; what they find is then put in its best order and evaluated by its exact period.
"""

from __future__ import annotations

from asyncspec.plugins.dipsd.evaluate import evaluate, in_best_order
from asyncspec.plugins.dipsd.model import Budget, Plan, PlanResult, ScannedCount, Tables
from asyncspec.plugins.dipsd.optimizer.association import associations, fewest_batches
from asyncspec.plugins.dipsd.optimizer.bound import Bound
from asyncspec.plugins.dipsd.optimizer.lengths import Solution, best_lengths
from asyncspec.plugins.dipsd.optimizer.search import Search

FEW = 6
"""Users up to which every association is tried: it takes less time than searching."""

WORK = 8_000_000
"""Units that a plan may take: some eight seconds of a slow core."""

SIMPLE = 100_000
"""Units for the plans of one batch, and of a batch for each user: no plan is worse than these."""

OUTLINES = 0.5
"""Share of the work for a first impression of all batch counts."""

OUTLINE_TRIES, TRIES, CROWD_TRIES = 2, 8, 4
"""Starts of a search, and periods tried at each: in an outline, up to ``CROWD`` users, above."""

CROWD = 16
"""Users above which a start costs too much to try as many."""

NEARLY = 0.9
"""Share of the best plan's throughput that an outline has to reach to count as one."""

CLOSE = 1e-12
"""Relative difference of two ratios that counts as rounding."""


def plan_best(tables: Tables, few: int = FEW, effort: float = 1.0) -> PlanResult | None:
    """The best plan; None if none fits. ``few``: see ``FEW``; ``effort``: share of ``WORK``."""
    scan = _Scan(tables, Budget(effort * WORK))
    scan.outline(few)
    scan.deepen()
    if scan.best is None:
        return None
    scanned = [
        ScannedCount(n, 1000 * scan.found[n] if n in scan.found else None, 1000 * bound)
        for n, bound in scan.bounds.items()
    ]
    return PlanResult(scan.best, tuple(scanned), 1000 * max(scan.limit, scan.ratio))


class _Scan:
    """What is known of each batch count. ``ratio`` is the best plan's by its exact period, in
    tokens a ms; ``limit`` bounds that of any plan but the best."""

    def __init__(self, tables: Tables, work: Budget) -> None:
        self.tables, self.work, self.bound = tables, work, Bound(tables)
        self.best: Plan | None = None
        self.ratio = self.limit = 0.0
        # By batch count: the bound, the ratio of a plan that was the best, the search.
        self.bounds: dict[int, float] = {}
        self.found: dict[int, float] = {}
        self.searches: dict[int, Search] = {}

    def outline(self, few: int) -> None:
        """Every batch count that the bound does not rule out; a few of many, and all of few."""
        first, users = fewest_batches(self.tables), self.tables.users
        # All small counts, of larger ones every fifth or so.
        outlined, n = set[int](), first
        while n <= users:
            outlined.add(n)
            n = max(n + 1, n * 6 // 5)
        each = OUTLINES * self.work.left / max(1, len(outlined))
        for batches in range(first, users + 1):
            if self._ruled_out(batches):
                return
            with self.work.part(each) as part:
                if users <= few:
                    # Exact whatever the effort is: this takes far less.
                    self._enumerate(batches, Budget(WORK))
                elif batches in (1, users):
                    self._enumerate(batches, Budget(SIMPLE))
                else:
                    self.limit = max(self.limit, self.bounds[batches])
                    search = Search(self.tables, batches, NEARLY * self.ratio)
                    self.searches[batches] = search
                    if batches in outlined:
                        search.scan(OUTLINE_TRIES, part)
                        self._take(batches, search.best)

    def deepen(self) -> None:
        """The counts that look best first, each with half of the work that is left."""
        # By what their outline found, or else that of the next lower count.
        promise, last = {}, 0.0
        for batches, search in self.searches.items():
            last = search.best.ratio if search.best else last
            promise[batches] = -last
        tries = TRIES if self.tables.users <= CROWD else CROWD_TRIES
        for batches in sorted(promise, key=promise.__getitem__):
            if not self._ruled_out(batches):
                search = self.searches[batches]
                with self.work.part(self.work.left / 2) as part:
                    search.scan(tries, part, self.ratio)
                    search.alternate(part)
                self._take(batches, search.best)

    def _ruled_out(self, batches: int) -> bool:
        """Whether no plan with so many batches or more is better than the best one."""
        bound = self.bound.above(batches, self.ratio)
        if self.best is not None and bound <= self.ratio * (1 + CLOSE):
            return True
        self.bounds.setdefault(batches, bound)
        return False

    def _enumerate(self, batches: int, work: Budget) -> None:
        """The best of all associations with so many batches: it is their bound, too."""
        best: Solution | None = None
        ratio = self.ratio
        for groups in associations(self.tables.users, batches, batches):
            solution = best_lengths(self.tables, groups, ratio, work)
            if solution is not None:
                best, ratio = solution, solution.ratio
        self.limit = max(self.limit, ratio if work.left > 0 else self.bounds[batches])
        self._take(batches, best)

    def _take(self, batches: int, solution: Solution | None) -> None:
        """A plan that is better by the two terms of the period, if it is by the exact one."""
        if solution is None or solution.ratio <= self.ratio:
            return
        plan = in_best_order(solution.plan, self.tables, self.work)
        exact = evaluate(plan, self.tables).throughput / 1000
        if exact > self.ratio:
            self.best, self.ratio = plan, exact
            self.found[batches] = exact
