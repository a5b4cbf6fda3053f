"""Associations: which users share a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from asyncspec.plugins.dipsd.model import FIRST_LENGTH, MAX_USERS, Groups, Tables


def associations(users: int, fewest: int = 1, largest: int = MAX_USERS) -> Iterator[Groups]:
    """All partitions of the users into ``fewest`` to ``largest`` batches (into any number: 1, 2, 5,
    15, 52, 203, ...); the last user joins a batch or opens one."""
    if users == 0 and fewest <= 0:
        yield ()
    if users == 0 or fewest > users or largest < 1:
        return
    m = users - 1
    for groups in associations(m, fewest, largest):
        for n, group in enumerate(groups):
            yield (*groups[:n], (*group, m), *groups[n + 1 :])
    for groups in associations(m, fewest - 1, largest - 1):
        yield (*groups, (m,))


def packed(tables: Tables, batches: int = 1) -> Groups | None:
    """Users by falling prefix, each batch as full as possible; then the largest are halved.

    At least ``batches`` batches, or more if memory or rows require it; None if some user does not
    fit at all. No association has fewer: the batch of the longest prefix has no more room than
    here, and filling it with the next longest leaves the easiest rest.
    """
    groups: list[tuple[int, ...]] = []
    for m in sorted(range(tables.users), key=lambda m: -tables.prefix[m]):
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
    """Batches of the smallest association that fits; more than users if none does."""
    groups = packed(tables)
    return tables.users + 1 if groups is None else len(groups)


def dealt(order: Sequence[int], batches: int) -> Groups:
    """Round robin: batches as alike as possible."""
    return tuple(tuple(sorted(order[n::batches])) for n in range(batches))


def cut(order: Sequence[int], batches: int) -> Groups:
    """Runs of equal size: batches as unlike as possible."""
    edges = [len(order) * n // batches for n in range(batches + 1)]
    return tuple(tuple(sorted(order[a:b])) for a, b in pairwise(edges))


def starts(tables: Tables, batches: int) -> Iterator[Groups]:
    """Starts of a search: users in several orders, dealt and cut. Those that fit, each once."""
    length = min(FIRST_LENGTH, tables.longest)
    candidates: list[Groups] = []
    for key in (
        [draft[length] for draft in tables.draft],
        [draft[1] for draft in tables.draft],
        [-gain[-1] for gain in tables.gain],
        tables.prefix,
    ):
        order = sorted(range(tables.users), key=key.__getitem__)
        candidates += (dealt(order, batches), cut(order, batches))
    # Where memory or rows are tight, the only one that fits.
    candidates += filter(None, (packed(tables, batches),))
    seen: set[frozenset[tuple[int, ...]]] = set()
    for groups in candidates:
        name = frozenset(groups)
        if len(groups) == batches and name not in seen and tables.all_fit(groups):
            seen.add(name)
            yield groups
