"""The fewest batches that the memory allows, where a batch's caches are padded to its longest."""

from __future__ import annotations

from asyncspec.dipsd.plan import Groups
from asyncspec.dipsd.tables import Tables


def packed(tables: Tables, batches: int = 1) -> Groups | None:
    """Users by falling prefix, each batch as full as it gets; then the largest are halved.

    As many batches as were asked for, or more if they do not fit in so few; None if somebody does
    not fit at all. Nobody can do with fewer: whatever batch the longest prefix is in, it has no
    more room than here, and filling it with the next longest leaves the easiest rest.
    """
    order = sorted(range(tables.users), key=lambda m: (-tables.prefix[m], m))
    groups: list[tuple[int, ...]] = []
    for m in order:
        if groups and tables.fits((*groups[-1], m)):
            groups[-1] = (*groups[-1], m)
        elif tables.fits((m,)):
            groups.append((m,))
        else:
            return None
    while len(groups) < batches:
        groups.sort(key=len)
        largest = groups.pop()
        half = len(largest) // 2
        groups += [largest[:half], largest[half:]]
    return tuple(tuple(sorted(group)) for group in groups)


def fewest_batches(tables: Tables) -> int:
    """How many it takes; more than there are users if somebody does not fit at all."""
    groups = packed(tables)
    return tables.users + 1 if groups is None else len(groups)
