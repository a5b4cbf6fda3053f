"""Our planner: one batch is a plan too, several starts, local search, and a bound that ends it.

A handful of users is enumerated: every association with its exact lengths, so on one stage the plan
is the optimum. More of them are searched (``search``). On several stages both go by the two terms
of the period, and what they find is then put in its best order and judged by its exact period.
"""

from __future__ import annotations

from asyncspec.dipsd.bound import upper_bound
from asyncspec.dipsd.evaluate import evaluate_on
from asyncspec.dipsd.exhaustive import associations
from asyncspec.dipsd.lengths import best_lengths
from asyncspec.dipsd.order import in_best_order
from asyncspec.dipsd.outcome import Planned, Scanned
from asyncspec.dipsd.packing import fewest_batches
from asyncspec.dipsd.plan import Plan, plan_of
from asyncspec.dipsd.search import Found, search
from asyncspec.dipsd.tables import Tables

FEW = 6
"""Users up to which every association is tried: it takes less time than searching."""

CLOSE = 1e-12


def plan_best(tables: Tables, few: int = FEW, effort: float = 1.0) -> Planned | None:
    """The best plan found; None if no batching fits in the memory. ``effort``: share of the usual
    search, where it has to be over soon."""
    best: Plan | None = None
    ratio, limit = 0.0, 0.0
    scanned = []
    for batches in range(fewest_batches(tables), tables.users + 1):
        bound = upper_bound(tables, batches, ratio)
        if best is not None and bound <= ratio * (1 + CLOSE):
            break
        every = tables.users <= few or batches in (1, tables.users)
        if every:
            found = _enumerated(tables, batches, ratio)
        else:
            found = search(tables, batches, ratio, effort)
        # Where everything was tried, the best of it is the bound of this batch count.
        limit = max(limit, (found.ratio if found else ratio) if every else bound)
        throughput = None
        if found is not None:
            plan = in_best_order(found.plan, tables)
            exact = evaluate_on(plan, tables).throughput / 1000
            if exact > ratio:
                best, ratio, throughput = plan, exact, 1000 * exact
        scanned.append(Scanned(batches, throughput, 1000 * bound))
    if best is None:
        return None
    return Planned(best, tuple(scanned), 1000 * max(limit, ratio))


def _enumerated(tables: Tables, batches: int, above: float) -> Found | None:
    """The best of all associations with so many batches, if above ``above`` tokens a ms."""
    best: Found | None = None
    for groups in associations(tables.users, batches):
        found = best_lengths(tables, groups, best.ratio if best else above)
        if found is not None:
            best = Found(found.ratio, plan_of(groups, found.by_user))
    return best
