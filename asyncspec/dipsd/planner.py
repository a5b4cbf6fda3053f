"""Our planner: one batch is a plan too, several starts, local search, and a bound that ends it.

A handful of users is enumerated: every association with its exact lengths, so on one stage the plan
is the optimum. More of them are searched (``search``): first an outline of every batch count, then
the counts that look best, as long as the work that is allowed lasts. On several stages all go by
the two terms of the period, and what they find is then put in its best order and verified by its
exact period.
"""

from __future__ import annotations

from asyncspec.dipsd.evaluate import evaluate_on
from asyncspec.dipsd.exhaustive import associations
from asyncspec.dipsd.lengths import best_lengths
from asyncspec.dipsd.order import in_best_order
from asyncspec.dipsd.outcome import Planned, Scanned
from asyncspec.dipsd.packing import fewest_batches
from asyncspec.dipsd.plan import Plan, plan_of
from asyncspec.dipsd.search import Search
from asyncspec.dipsd.tables import Tables
from asyncspec.dipsd.work import Work

FEW = 6
"""Users up to which every association is tried: it takes less time than searching."""

WORK = 8_000_000
"""Units that a plan may take: some eight seconds of a slow core."""

SIMPLE = 100_000
"""Units for the lengths of all users in one batch, and of everybody in one of their own: what a
plan is never worse than."""

OUTLINES = 0.5
"""Share of the work for a first impression of all batch counts."""

NEARLY = 0.9
"""Share of the best plan's throughput that an outline has to reach to count as one."""

CLOSE = 1e-12


def plan_best(tables: Tables, few: int = FEW, effort: float = 1.0) -> Planned | None:
    """The best plan found; None if no batching fits in the memory. ``effort``: share of the usual
    work, where it has to be over soon."""
    scan = _Scan(tables, few, effort)
    scan.outline()
    scan.deepen()
    return scan.planned()


class _Scan:
    """What is known of each batch count; ``ratio`` is the best plan's, in tokens a ms, exactly."""

    def __init__(self, tables: Tables, few: int, effort: float) -> None:
        # Here, because numpy takes longer to import than most commands run.
        from asyncspec.dipsd.bound import Bound

        self.tables, self.few = tables, few
        self.relaxed = Bound(tables)
        self.work = Work(effort * WORK)
        self.best: Plan | None = None
        self.ratio = self.limit = 0.0
        self.bounds: dict[int, float] = {}
        self.found: dict[int, float] = {}
        self.searches: dict[int, Search] = {}

    def outline(self) -> None:
        """Every batch count that the bound does not rule out; a few of many, and all of few."""
        first, users = fewest_batches(self.tables), self.tables.users
        outlined = set(_spread(first, users))
        each = OUTLINES * self.work.left / max(1, len(outlined))
        for batches in range(first, users + 1):
            bound = self.relaxed.above(batches, self.ratio)
            if self._ruled_out(bound):
                return
            self.bounds[batches] = bound
            part = self.work.part(each)
            if users <= self.few:
                # Exact whatever the effort is: this takes far less.
                self._enumerate(batches, Work(WORK))
            elif batches in (1, users):
                self._enumerate(batches, Work(SIMPLE))
            else:
                self.limit = max(self.limit, bound)
                self.searches[batches] = self._outlined(batches, part, batches in outlined)
            self.work.take_back(part)

    def _outlined(self, batches: int, work: Work, now: bool) -> Search:
        search = Search(self.tables, batches, NEARLY * self.ratio)
        if now:
            search.outline(work)
            self._judge(batches, search)
        return search

    def deepen(self) -> None:
        """The counts that look best first, each with half of the work that is left."""
        for batches in self._by_promise():
            if self._ruled_out(self.relaxed.above(batches, self.ratio)):
                continue
            part = self.work.part(self.work.left / 2)
            search = self.searches[batches]
            search.deepen(part, self.ratio)
            self.work.take_back(part)
            self._judge(batches, search)

    def planned(self) -> Planned | None:
        """What came of it."""
        if self.best is None:
            return None
        scanned = [
            Scanned(n, 1000 * self.found[n] if n in self.found else None, 1000 * bound)
            for n, bound in self.bounds.items()
        ]
        return Planned(self.best, tuple(scanned), 1000 * max(self.limit, self.ratio))

    def _ruled_out(self, bound: float) -> bool:
        return self.best is not None and bound <= self.ratio * (1 + CLOSE)

    def _by_promise(self) -> list[int]:
        """Counts by what their outline found, or else that of the next lower count."""
        promise, last = {}, 0.0
        for batches, search in self.searches.items():
            last = search.ratio if search.plan is not None else last
            promise[batches] = last
        return sorted(promise, key=lambda batches: -promise[batches])

    def _judge(self, batches: int, search: Search) -> None:
        if search.plan is not None and search.ratio > self.ratio:
            self._take(batches, search.plan)

    def _take(self, batches: int, plan: Plan) -> None:
        """A plan that is better by the two terms of the period, by all of them."""
        plan = in_best_order(plan, self.tables, self.work)
        exact = evaluate_on(plan, self.tables).throughput / 1000
        if exact > self.ratio:
            self.best, self.ratio = plan, exact
            self.found[batches] = exact

    def _enumerate(self, batches: int, work: Work) -> None:
        """The best of all associations with so many batches: it is their bound, too."""
        best: Plan | None = None
        ratio = self.ratio
        for groups in associations(self.tables.users, batches):
            found = best_lengths(self.tables, groups, ratio, work)
            if found is not None:
                best, ratio = plan_of(groups, found.by_user), found.ratio
        tried = work.left > 0
        self.limit = max(self.limit, ratio if tried else self.bounds[batches])
        if best is not None:
            self._take(batches, best)


def _spread(first: int, last: int) -> list[int]:
    """Batch counts that are outlined: all small ones, of larger ones every fifth or so."""
    counts, n = [], first
    while n <= last:
        counts.append(n)
        n = max(n + 1, n * 6 // 5)
    return counts
