"""The association step: which users share a batch, for given draft lengths, in the shortest cycle.

The paper solves it as a mixed-integer program. Here it is a depth-first search with bounds, exact
as far as its nodes reach (about ten users). Of equal periods the one with less work wins: the
length step uses the slack that it leaves, and without that rule the alternation stops early.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations, pairwise, permutations
from typing import NamedTuple

from asyncspec.dipsd.lengths import best_lengths
from asyncspec.dipsd.model import FIRST_LENGTH, Groups, Plan, plan_of
from asyncspec.dipsd.tables import Budget, Tables


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


NODES = 20_000
"""Nodes of the depth-first search."""

ALTERNATIONS = 30

Cost = tuple[float, float]
"""(period in ms, work in FLOPs), compared in this order."""


class Association(NamedTuple):
    """``proved``: no association of these lengths has a lower cost."""

    groups: Groups
    cost: Cost
    proved: bool


def associate(
    tables: Tables,
    lengths: Sequence[int],
    batches: int,
    first: Groups | None = None,
    nodes: int = NODES,
    allowed: Budget | None = None,
) -> Association | None:
    """The best association into ``batches`` batches; None if none fits in the memory.

    ``allowed`` ends the search where it is over; what was found by then is returned.
    """
    if allowed is None:
        allowed = Budget(math.inf)
    order = by_readiness(tables, lengths)
    given = (first, cut(order, batches), dealt(order, batches), packed(tables, batches))
    begun = [groups for groups in given if groups and len(groups) == batches]
    fitting = [groups for groups in begun if tables.all_fit(groups)]
    climbed = [Association(g, cost(tables, lengths, g), False) for g in fitting]
    best = min(climbed, default=None, key=lambda found: found.cost)
    # A node of the search tree costs as much as a neighbour does.
    nodes = int(min(nodes, 1 + max(0.0, allowed.left) / _price(batches)))
    allowed.spend(nodes * _price(batches))
    return depth_first(tables, lengths, batches, best, nodes)


def _price(batches: int) -> int:
    """Units of work of one ``cost``."""
    return 5 + 4 * batches


def by_readiness(tables: Tables, lengths: Sequence[int]) -> list[int]:
    """Users, the quickest with their draft first."""
    return sorted(range(tables.users), key=lambda m: (tables.draft[m][lengths[m]], m))


def depth_first(
    tables: Tables,
    lengths: Sequence[int],
    batches: int,
    best: Association | None = None,
    nodes: int = NODES,
) -> Association | None:
    """Whatever is better than ``best``, within so many nodes of the search tree."""
    order = by_readiness(tables, lengths)[::-1]
    return _Search(tables, lengths, batches, order, nodes).run(best)


def cost(tables: Tables, lengths: Sequence[int], groups: Groups) -> Cost:
    """The period (its two terms) and the work of the batches."""
    loop = total = 0.0
    for group in groups:
        work = tables.work(group)[max(lengths[m] for m in group)]
        total += work
        drafted = max(tables.draft[m][lengths[m]] for m in group)
        loop = max(loop, drafted + tables.passing(work))
    return max(loop, tables.server(total, len(groups))), total


class _Search:
    """Depth first over the users, the slowest first; a batch that is empty is opened once."""

    def __init__(
        self, tables: Tables, lengths: Sequence[int], batches: int, order: list[int], nodes: int
    ) -> None:
        self.tables, self.lengths, self.batches = tables, lengths, batches
        self.order, self.nodes = order, nodes
        self.best: Association | None = None
        # What the users from i on need at least, each with rows of their own.
        rest = [0.0]
        for m in reversed(order):
            rest.append(rest[-1] + tables.row(tables.prefix[m])[lengths[m]])
        self.rest = rest[::-1]

    def run(self, best: Association | None) -> Association | None:
        self.best = best
        self._descend(0, ())
        if self.best is None:
            return None
        return self.best._replace(proved=self.nodes > 0)

    def _descend(self, i: int, groups: Groups) -> None:
        self.nodes -= 1
        if self.nodes <= 0 or len(self.order) - i < self.batches - len(groups):
            return
        if groups and not self._promising(i, groups):
            return
        if i == len(self.order):
            found = cost(self.tables, self.lengths, groups)
            if self.best is None or found < self.best.cost:
                self.best = Association(groups, found, False)
            return
        m = self.order[i]
        for n, group in enumerate(groups):
            with_m = tuple(sorted((*group, m)))
            if self.tables.fits(with_m):
                self._descend(i + 1, (*groups[:n], with_m, *groups[n + 1 :]))
        if len(groups) < self.batches and self.tables.fits((m,)):
            self._descend(i + 1, (*groups, (m,)))

    def _promising(self, i: int, groups: Groups) -> bool:
        if self.best is None:
            return True
        period, work = cost(self.tables, self.lengths, groups)
        work += self.rest[i]
        period = max(period, self.tables.server(work, self.batches))
        return (period, work) < self.best.cost


def alternate(
    tables: Tables, batches: int, nodes: int = NODES, work: Budget | None = None
) -> tuple[float, Plan] | None:
    """(tokens a ms, plan) for a batch count: association and lengths until nothing changes, or
    the ``work`` is done."""
    lengths: Sequence[int] = [min(FIRST_LENGTH, tables.longest)] * tables.users
    groups: Groups | None = None
    best: tuple[float, Plan] | None = None
    for _ in range(ALTERNATIONS):
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
