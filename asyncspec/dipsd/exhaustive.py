"""Every association: for a handful of users, and for measuring planners against."""

from __future__ import annotations

from collections.abc import Iterator

from asyncspec.dipsd.plan import Groups


def associations(users: int, batches: int | None = None) -> Iterator[Groups]:
    """All partitions of the users (1, 2, 5, 15, 52, 203, ...), or those into so many batches."""
    fewest, most = (1, users) if batches is None else (batches, batches)
    yield from _partitions(users, fewest, most)


def _partitions(users: int, fewest: int, most: int) -> Iterator[Groups]:
    """Those with ``fewest`` to ``most`` batches; the last user joins one or opens one."""
    if users == 0:
        if fewest <= 0:
            yield ()
        return
    m = users - 1
    # Nobody may be left over, and there must be enough users for the batches still missing.
    if fewest > users or most < 1:
        return
    for groups in _partitions(m, fewest, most):
        for n, group in enumerate(groups):
            yield (*groups[:n], (*group, m), *groups[n + 1 :])
    for groups in _partitions(m, fewest - 1, most - 1):
        yield (*groups, (m,))
