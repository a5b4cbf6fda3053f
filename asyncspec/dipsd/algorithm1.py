"""Algorithm 1 of DiP-SD: scan the batch count; for each, association and lengths in turn.

Two things are not as in the paper, neither changes its answer: the sub-problems are solved without
a solver, and the scan ends where a bound says that more batches cannot win.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncspec.dipsd.associate import NODES, associate
from asyncspec.dipsd.lengths import best_lengths
from asyncspec.dipsd.order import in_best_order
from asyncspec.dipsd.outcome import Planned, Scanned
from asyncspec.dipsd.packing import fewest_batches
from asyncspec.dipsd.plan import Groups, Plan, plan_of
from asyncspec.dipsd.presets import FIRST_LENGTH
from asyncspec.dipsd.tables import Tables
from asyncspec.dipsd.work import Work

ROUNDS = 30


def algorithm1(tables: Tables) -> Planned | None:
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
        scanned.append(Scanned(batches, 1000 * found[0] if found else None, 1000 * bound))
        if found is not None and (best is None or found[0] > best[0]):
            best = found
    if best is None:
        return None
    return Planned(in_best_order(best[1], tables), tuple(scanned), 1000 * limit)


def first_count(tables: Tables) -> int:
    """Where the paper's scan of batch counts starts: two, or as many as the memory asks for."""
    return max(min(2, tables.users), fewest_batches(tables))


def alternate(
    tables: Tables, batches: int, nodes: int = NODES, work: Work | None = None
) -> tuple[float, Plan] | None:
    """(tokens a ms, plan) for a batch count: association and lengths until nothing changes, or
    the ``work`` is done."""
    lengths: Sequence[int] = [min(FIRST_LENGTH, tables.longest)] * tables.users
    groups: Groups | None = None
    best: tuple[float, Plan] | None = None
    for _ in range(ROUNDS):
        association = associate(tables, lengths, batches, groups, nodes, work)
        if association is None:
            return None
        groups = association.groups
        found = best_lengths(tables, groups, work=work)
        if found is None:
            return None
        if best is None or found.ratio > best[0]:
            best = (found.ratio, plan_of(groups, found.by_user))
        then = [found.by_user[m] for m in range(tables.users)]
        if then == lengths or (work is not None and work.left <= 0):
            break
        lengths = then
    return best
