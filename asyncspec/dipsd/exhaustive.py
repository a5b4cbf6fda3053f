"""Every association: what the planners are measured against, for a handful of users."""

from __future__ import annotations

from collections.abc import Iterator

from asyncspec.dipsd.lengths import best_lengths
from asyncspec.dipsd.plan import Groups, Plan, plan_of
from asyncspec.dipsd.tables import Tables


def associations(users: int) -> Iterator[Groups]:
    """All partitions of the users into batches: 1, 2, 5, 15, 52, 203, 877, ... of them."""
    if users == 0:
        yield ()
        return
    m = users - 1
    for groups in associations(m):
        for n, group in enumerate(groups):
            yield (*groups[:n], (*group, m), *groups[n + 1 :])
        yield (*groups, (m,))


def exhaustive(tables: Tables, fewest: int = 1) -> tuple[float, Plan] | None:
    """(tokens a ms, plan): the optimum over all associations with ``fewest`` batches or more.

    The ratio is by the two terms of the period, which is all of it on one stage.
    """
    best: tuple[float, Plan] | None = None
    for groups in associations(tables.users):
        if len(groups) < fewest:
            continue
        found = best_lengths(tables, groups, best[0] if best else 0.0)
        if found is not None:
            best = (found.ratio, plan_of(groups, found.by_user))
    return best
