"""Every association: for a handful of users, and for measuring planners against."""

from __future__ import annotations

from collections.abc import Iterator

from asyncspec.dipsd.plan import Groups


def associations(users: int, batches: int | None = None) -> Iterator[Groups]:
    """All partitions of the users (1, 2, 5, 15, 52, 203, ...), or those into so many batches."""
    for groups in _partitions(users):
        if batches is None or len(groups) == batches:
            yield groups


def _partitions(users: int) -> Iterator[Groups]:
    if users == 0:
        yield ()
        return
    m = users - 1
    for groups in _partitions(m):
        for n, group in enumerate(groups):
            yield (*groups[:n], (*group, m), *groups[n + 1 :])
        yield (*groups, (m,))
