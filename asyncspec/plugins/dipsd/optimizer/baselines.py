"""The paper's Algorithm 1 and the baselines that plans are compared with.

Algorithm 1 scans batch counts, and alternates an association step with a length step. The paper
solves the association step as a mixed-integer program. Here it is a depth-first search with bounds,
exact as far as its nodes reach (about ten users). Of equal periods the one with less work wins: the
length step uses the slack that it leaves, and without that rule the alternation stops early.

Baselines are in tokens a second; None where they do not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

from asyncspec.plugins.dipsd.evaluate import exact_period, in_best_order
from asyncspec.plugins.dipsd.model import (
    FIRST_LENGTH,
    Budget,
    Groups,
    PlanResult,
    ScannedCount,
    Tables,
)
from asyncspec.plugins.dipsd.optimizer.association import cut, dealt, fewest_batches, packed
from asyncspec.plugins.dipsd.optimizer.bound import Bound
from asyncspec.plugins.dipsd.optimizer.lengths import Solution, best_lengths, common_length

NODES, BASELINE_NODES = 20_000, 2000
"""Nodes of an association step's search, about a tenth of a second; and of a baseline's."""

MAX_ALTERNATIONS = 30
"""Far more than any alternation takes: its ratio only rises."""

Cost = tuple[float, float]
"""(period in ms, work in FLOPs), compared in this order."""


def algorithm1(tables: Tables) -> PlanResult | None:
    """The paper's plan; None if no association fits. A single user is a batch.

    Its bound is one for plans with two batches or more: the paper's scan starts there.
    """
    bounds = Bound(tables)
    best: Solution | None = None
    scanned = []
    limit = 0.0
    for batches in range(first_count(tables), tables.users + 1):
        ratio = 0.0 if best is None else best.ratio
        bound = bounds.above(batches, ratio)
        if best is not None and bound <= ratio:
            break
        solution = alternate(tables, batches, NODES, Budget(math.inf))
        limit = max(limit, bound)
        scanned.append(
            ScannedCount(batches, 1000 * solution.ratio if solution else None, 1000 * bound)
        )
        if solution is not None and solution.ratio > ratio:
            best = solution
    if best is None:
        return None
    return PlanResult(in_best_order(best.plan, tables), tuple(scanned), 1000 * limit)


def first_count(tables: Tables) -> int:
    """Where the paper's scan of batch counts starts: two, or as many as fit at least."""
    return max(min(2, tables.users), fewest_batches(tables))


def alternate(tables: Tables, batches: int, nodes: int, work: Budget) -> Solution | None:
    """The best plan for a batch count; None if no association fits. ``nodes``: of each association
    step, as far as the ``work`` allows."""
    lengths = (min(FIRST_LENGTH, tables.longest),) * tables.users
    groups: Groups | None = None
    best: Solution | None = None
    for _ in range(MAX_ALTERNATIONS):
        # Units of work of a node.
        price = 5 + 4 * batches
        allowed = int(min(nodes, 1 + max(0.0, work.left) / price))
        work.spend(allowed * price)
        associated = associate(tables, lengths, batches, groups, allowed)
        if associated is None:
            return None
        groups = associated[1]
        solution = best_lengths(tables, groups, work=work)
        if solution is None:
            return None
        if best is None or solution.ratio > best.ratio:
            best = solution
        previous, lengths = lengths, solution.plan.lengths
        if lengths == previous or work.left <= 0:
            break
    return best


def associate(
    tables: Tables,
    lengths: Sequence[int],
    batches: int,
    first: Groups | None = None,
    nodes: int = NODES,
) -> tuple[Cost, Groups] | None:
    """The association step: the association of least cost; None if none fits. The search starts
    from ``first`` and from simple ones."""
    # Users, the quickest with their draft first.
    order = sorted(range(tables.users), key=lambda m: tables.draft[m][lengths[m]])
    starts = (first, cut(order, batches), dealt(order, batches), packed(tables, batches))
    fitting = (g for g in starts if g and len(g) == batches and tables.all_fit(g))
    costs = ((cost(tables, lengths, g), g) for g in fitting)
    best = min(costs, default=None, key=itemgetter(0))
    return depth_first(tables, lengths, batches, order[::-1], nodes, best)


def cost(tables: Tables, lengths: Sequence[int], groups: Groups) -> Cost:
    """The period (its two terms) and the work of the batches."""
    loop = total = 0.0
    for group in groups:
        work = tables.batch_work(group, lengths)
        total += work
        drafted = max([tables.draft[m][lengths[m]] for m in group])
        loop = max(loop, drafted + tables.passing(work))
    return max(loop, tables.server(total, len(groups))), total


def depth_first(
    tables: Tables,
    lengths: Sequence[int],
    batches: int,
    order: Sequence[int],
    nodes: int,
    best: tuple[Cost, Groups] | None = None,
) -> tuple[Cost, Groups] | None:
    """The least cost within so many nodes, or ``best``. The slowest user first prunes most."""
    # FLOPs that the users from i on need at least, each with rows of their own.
    rest = [0.0]
    for m in reversed(order):
        rest.append(rest[-1] + tables.rows[tables.prefix[m]][lengths[m]])
    rest.reverse()

    def descend(i: int, groups: Groups) -> None:
        nonlocal nodes, best
        nodes -= 1
        if nodes <= 0 or len(order) - i < batches - len(groups):
            return
        if groups:
            period, work = cost(tables, lengths, groups)
            least = max(period, tables.server(work + rest[i], batches)), work + rest[i]
            if best is not None and least >= best[0]:
                return
            if i == len(order):
                best = (period, work), groups
                return
        m = order[i]
        for n, group in enumerate(groups):
            with_m = tuple(sorted((*group, m)))
            if tables.fits(with_m):
                descend(i + 1, (*groups[:n], with_m, *groups[n + 1 :]))
        if len(groups) < batches and tables.fits((m,)):
            descend(i + 1, (*groups, (m,)))

    descend(0, ())
    return best


def autoregressive(tables: Tables) -> float:
    """AD: users one after another, a token a pass. Nothing is charged for communication."""
    steps = (tables.passing(tables.rows[prefix][1]) for prefix in tables.prefix)
    return 1000 * tables.users / sum(steps)


def greedy_batching(tables: Tables) -> float | None:
    """AD with greedy batching: a token for each user in one pass, as far as the memory allows.

    On several stages one batch would leave all but one of them idle, so there as many batches go
    round as are best. Users with prefixes of like length go together.
    """
    order = sorted(range(tables.users), key=lambda m: tables.prefix[m])
    hop = tables.deployment.verifier.hop_ms
    periods = []
    for batches in range(1, tables.users + 1):
        groups = cut(order, batches)
        if tables.all_fit(groups):
            passes = [tables.stages(tables.work(group)[1]) for group in groups]
            periods.append(exact_period([0.0] * batches, passes, hop))
    return 1000 * tables.users / min(periods) if periods else None


def one_batch(tables: Tables) -> float | None:
    """Speculative decoding of all users in one batch, unpipelined, each with the best length."""
    solution = best_lengths(tables, (tuple(range(tables.users)),))
    return None if solution is None else 1000 * solution.ratio


def unbatched(tables: Tables) -> float:
    """Each user a batch of its own, with the best length that all share."""
    return 1000 * common_length(tables, [(m,) for m in range(tables.users)])[0]


def fixed_length(tables: Tables) -> float | None:
    """Two or more batches, associated for the shortest cycle; one draft length for all."""
    length = min(FIRST_LENGTH, tables.longest)
    tokens = sum(gain[length] for gain in tables.gain)
    least = sum(tables.rows[prefix][length] for prefix in tables.prefix)
    best = 0.0
    for batches in range(first_count(tables), tables.users + 1):
        if tokens / tables.server(least, batches) <= best:
            break
        association = associate(tables, [length] * tables.users, batches, nodes=BASELINE_NODES)
        if association is not None:
            (period, _), _ = association
            best = max(best, tokens / period)
    return 1000 * best if best else None


def round_robin(tables: Tables) -> float | None:
    """Two or more batches, dealt in the users' own order, with the best lengths."""
    bound = Bound(tables)
    best = 0.0
    for batches in range(first_count(tables), tables.users + 1):
        if bound.above(batches, best) <= best:
            break
        solution = best_lengths(tables, dealt(range(tables.users), batches), best)
        best = best if solution is None else solution.ratio
    return 1000 * best if best else None


BASELINES: Mapping[str, Callable[[Tables], float | None]] = {
    "ad": autoregressive,
    "ad_greedy": greedy_batching,
    "one_batch": one_batch,
    "fixed_length": fixed_length,
    "round_robin": round_robin,
    "unbatched": unbatched,
}
