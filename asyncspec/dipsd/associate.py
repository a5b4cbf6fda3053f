"""The association step: who goes with whom, for given draft lengths, so that the cycle is short.

The paper solves it as a mixed-integer program. Here a local search comes first and a depth-first
search with bounds proves or improves what it found, as far as its nodes reach (cohorts of ten users
or so are always proved). Of equal periods the one with less work wins: the slack it leaves is what
the length step lives on, and without that rule the alternation gets stuck.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from asyncspec.dipsd.neighbours import neighbours
from asyncspec.dipsd.packing import packed
from asyncspec.dipsd.plan import Groups
from asyncspec.dipsd.starts import cut, dealt
from asyncspec.dipsd.tables import Tables
from asyncspec.dipsd.work import Work

NODES = 20_000

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
    allowed: Work | None = None,
) -> Association | None:
    """The best association into ``batches`` batches; None if none fits in the memory.

    ``allowed`` ends the search where it is over; what was found by then is returned.
    """
    if allowed is None:
        allowed = Work(math.inf)
    order = by_readiness(tables, lengths)
    given = (first, cut(order, batches), dealt(order, batches), packed(tables, batches))
    begun = [groups for groups in given if groups and len(groups) == batches]
    fitting = [groups for groups in begun if tables.all_fit(groups)]
    climbed = [_climb(tables, lengths, groups, allowed) for groups in fitting]
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


def _climb(tables: Tables, lengths: Sequence[int], groups: Groups, allowed: Work) -> Association:
    """Steps to cheaper neighbours until there is none, or no more is allowed."""
    now, better = cost(tables, lengths, groups), True
    while better:
        better = False
        for other in neighbours(groups):
            if not allowed.spend(_price(len(groups))):
                break
            if not tables.all_fit(other):
                continue
            then = cost(tables, lengths, other)
            if then < now:
                groups, now, better = other, then, True
                break
    return Association(groups, now, False)


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
