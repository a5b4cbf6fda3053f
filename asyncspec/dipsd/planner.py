"""Planners: ours, the paper's Algorithm 1, and the baselines that plans are compared with.

A handful of users is enumerated: every association with its exact lengths, so on one stage the plan
is the optimum. More of them are searched (``search``): first an outline of every batch count, then
the counts that look best, as long as the budget lasts. On several stages all go by the two terms of
the period; what they find is then put in its best order and evaluated by its exact period.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncspec.dipsd.association import alternate, associate, associations, cut, fewest_batches
from asyncspec.dipsd.evaluate import evaluate, exact_period, in_best_order
from asyncspec.dipsd.lengths import best_lengths, common_ratio
from asyncspec.dipsd.model import FIRST_LENGTH, Groups, Plan, PlanResult, ScannedCount, plan_of
from asyncspec.dipsd.tables import Budget, Tables

if TYPE_CHECKING:
    from asyncspec.dipsd.search import Search

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


def plan_best(tables: Tables, few: int = FEW, effort: float = 1.0) -> PlanResult | None:
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
        self.work = Budget(effort * WORK)
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
                self._enumerate(batches, Budget(WORK))
            elif batches in (1, users):
                self._enumerate(batches, Budget(SIMPLE))
            else:
                self.limit = max(self.limit, bound)
                self.searches[batches] = self._outlined(batches, part, batches in outlined)
            self.work.take_back(part)

    def _outlined(self, batches: int, work: Budget, now: bool) -> Search:
        from asyncspec.dipsd.search import Search

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

    def planned(self) -> PlanResult | None:
        """What came of it."""
        if self.best is None:
            return None
        scanned = [
            ScannedCount(n, 1000 * self.found[n] if n in self.found else None, 1000 * bound)
            for n, bound in self.bounds.items()
        ]
        return PlanResult(self.best, tuple(scanned), 1000 * max(self.limit, self.ratio))

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
        exact = evaluate(plan, self.tables).throughput / 1000
        if exact > self.ratio:
            self.best, self.ratio = plan, exact
            self.found[batches] = exact

    def _enumerate(self, batches: int, work: Budget) -> None:
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


def algorithm1(tables: Tables) -> PlanResult | None:
    """The paper's plan; None if no batching fits in the memory. A single user is their own batch.

    Its bound is one for plans with two batches or more: the paper's scan starts there.
    """
    # Here, because numpy takes longer to import than most commands run.
    from asyncspec.dipsd.bound import Bound

    relaxed = Bound(tables)
    best: tuple[float, Plan] | None = None
    scanned = []
    limit = 0.0
    for batches in range(first_count(tables), tables.users + 1):
        ratio = 0.0 if best is None else best[0]
        bound = relaxed.above(batches, ratio)
        if best is not None and bound <= ratio:
            break
        found = alternate(tables, batches)
        limit = max(limit, bound)
        scanned.append(ScannedCount(batches, 1000 * found[0] if found else None, 1000 * bound))
        if found is not None and (best is None or found[0] > best[0]):
            best = found
    if best is None:
        return None
    return PlanResult(in_best_order(best[1], tables), tuple(scanned), 1000 * limit)


def first_count(tables: Tables) -> int:
    """Where the paper's scan of batch counts starts: two, or as many as the memory asks for."""
    return max(min(2, tables.users), fewest_batches(tables))


BASELINE_NODES = 2000


def autoregressive(tables: Tables) -> float:
    """AD: users one after another, a token a pass. Nothing is charged for communication."""
    steps = (tables.passing(tables.row(prefix)[1]) for prefix in tables.prefix)
    return 1000 * tables.users / sum(steps)


def greedy_batching(tables: Tables) -> float | None:
    """AD with greedy batching: a token for everybody in one pass, as far as the memory allows.

    On several stages one batch would leave all but one of them idle, so there as many batches go
    round as are best. Users with prefixes of like length go together.
    """
    order = sorted(range(tables.users), key=lambda m: tables.prefix[m])
    rates = [_without_drafts(tables, groups) for groups in _cuts(tables, order)]
    return max(rates, default=None)


def _cuts(tables: Tables, order: list[int]) -> Iterator[Groups]:
    for batches in range(1, tables.users + 1):
        groups = cut(order, batches)
        if tables.all_fit(groups):
            yield groups


def _without_drafts(tables: Tables, groups: Groups) -> float:
    rates = list(zip(tables.slopes, tables.fixed, strict=True))
    passes = [[slope * tables.work(g)[1] + fixed for slope, fixed in rates] for g in groups]
    hop = tables.deployment.verifier.hop_ms
    return 1000 * tables.users / exact_period([0.0] * len(groups), passes, hop)


def one_batch(tables: Tables) -> float | None:
    """Speculative decoding of all users in one batch, unpipelined, each with the best length."""
    found = best_lengths(tables, (tuple(range(tables.users)),))
    return None if found is None else 1000 * found.ratio


def unbatched(tables: Tables) -> float:
    """Everybody a batch of their own, with the best length that all share."""
    return 1000 * common_ratio(tables, [(m,) for m in range(tables.users)])


def fixed_length(tables: Tables, length: int = FIRST_LENGTH) -> float | None:
    """Two or more batches, associated for the shortest cycle; one draft length for all."""
    length = min(length, tables.longest)
    lengths = [length] * tables.users
    tokens = sum(gain[length] for gain in tables.gain)
    least = sum(tables.row(prefix)[length] for prefix in tables.prefix)
    best = 0.0
    for batches in range(first_count(tables), tables.users + 1):
        if tokens / tables.server(least, batches) <= best:
            break
        found = associate(tables, lengths, batches, nodes=BASELINE_NODES)
        if found is not None:
            best = max(best, tokens / found.cost[0])
    return 1000 * best if best else None


def round_robin(tables: Tables) -> float | None:
    """Two or more batches, dealt in the users' own order, with the best lengths."""
    # Here, because numpy takes longer to import than most commands run.
    from asyncspec.dipsd.bound import Bound

    relaxed = Bound(tables)
    best = 0.0
    for batches in range(first_count(tables), tables.users + 1):
        if relaxed.above(batches, best) <= best:
            break
        groups = [tuple(range(n, tables.users, batches)) for n in range(batches)]
        found = best_lengths(tables, groups, best)
        best = best if found is None else found.ratio
    return 1000 * best if best else None


BASELINES = {
    "ad": autoregressive,
    "ad_greedy": greedy_batching,
    "one_batch": one_batch,
    "fixed_length": fixed_length,
    "round_robin": round_robin,
    "unbatched": unbatched,
}
