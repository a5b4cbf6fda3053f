"""Associations one step away: a user goes to another batch, or two users change places."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, permutations

from asyncspec.dipsd.plan import Groups


def neighbours(groups: Groups) -> Iterator[Groups]:
    """All of them, moves before swaps, with as many batches as before."""
    for source, target in permutations(range(len(groups)), 2):
        if len(groups[source]) > 1:
            for m in groups[source]:
                yield _with(groups, source, target, m, None)
    for left, right in combinations(range(len(groups)), 2):
        for m in groups[left]:
            for other in groups[right]:
                yield _with(groups, left, right, m, other)


def exchanged(group: tuple[int, ...], out: int | None, into: int | None) -> tuple[int, ...]:
    """The batch without ``out`` and with ``into``."""
    kept = [x for x in group if x != out]
    if into is not None:
        kept.append(into)
    return tuple(sorted(kept))


def _with(groups: Groups, left: int, right: int, m: int, other: int | None) -> Groups:
    """``m`` goes from ``left`` to ``right``, ``other`` the other way."""
    changed = list(groups)
    changed[left] = exchanged(groups[left], m, other)
    changed[right] = exchanged(groups[right], other, m)
    return tuple(changed)
