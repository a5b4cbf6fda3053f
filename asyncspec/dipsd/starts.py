"""Associations to start a search from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

from asyncspec.dipsd.packing import packed
from asyncspec.dipsd.plan import Groups
from asyncspec.dipsd.tables import Tables


def dealt(order: Sequence[int], batches: int) -> Groups:
    """Round robin: batches as alike as can be."""
    return tuple(tuple(sorted(order[n::batches])) for n in range(batches))


def cut(order: Sequence[int], batches: int) -> Groups:
    """Runs of equal size: batches as unlike as can be."""
    edges = [len(order) * n // batches for n in range(batches + 1)]
    return tuple(tuple(sorted(order[a:b])) for a, b in pairwise(edges))


def starts(tables: Tables, batches: int, length: int) -> Iterator[Groups]:
    """Users in several orders, dealt and cut; every association once, all that fit."""
    length = min(length, tables.longest)
    keys = [
        [tables.draft[m][length] for m in range(tables.users)],
        [tables.draft[m][1] for m in range(tables.users)],
        [-tables.gain[m][-1] for m in range(tables.users)],
        [float(prefix) for prefix in tables.prefix],
    ]
    candidates: list[Groups] = []
    seen: set[frozenset[tuple[int, ...]]] = set()
    for key in keys:
        order = sorted(range(tables.users), key=partial(_at, key))
        candidates += (dealt(order, batches), cut(order, batches))
    if (close := packed(tables, batches)) is not None and len(close) == batches:
        # Where the memory is tight, the only one of them that fits.
        candidates.append(close)
    for groups in candidates:
        name = frozenset(groups)
        if name not in seen and tables.all_fit(groups):
            seen.add(name)
            yield groups


def _at(key: Sequence[float], m: int) -> tuple[float, int]:
    return key[m], m
