"""Associations one step away: a user goes to another batch, or two users change places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations

from asyncspec.dipsd.plan import Groups


def neighbours(groups: Groups) -> Iterator[Groups]:
    """All of them, moves before swaps, with as many batches as before."""
    for source, target in permutations(range(len(groups)), 2):
        if len(groups[source]) > 1:
            for m in groups[source]:
                yield moved(groups, m, source, target)
    for left, right in combinations(range(len(groups)), 2):
        for m in groups[left]:
            for other in groups[right]:
                yield swapped(groups, m, left, other, right)


def moved(groups: Groups, m: int, source: int, target: int) -> Groups:
    """``m`` leaves batch ``source`` for batch ``target``."""
    there = (*groups[target], m)
    return _with(groups, {source: _without(groups[source], m), target: there})


def swapped(groups: Groups, m: int, left: int, other: int, right: int) -> Groups:
    """``m`` of batch ``left`` and ``other`` of batch ``right`` change places."""
    return _with(
        groups,
        {left: (*_without(groups[left], m), other), right: (*_without(groups[right], other), m)},
    )


def _without(group: Sequence[int], m: int) -> tuple[int, ...]:
    return tuple(x for x in group if x != m)


def _with(groups: Groups, changed: dict[int, tuple[int, ...]]) -> Groups:
    return tuple(tuple(sorted(changed.get(n, group))) for n, group in enumerate(groups))
