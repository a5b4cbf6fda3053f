"""Two drafted tokens a round: the smallest policy that speculates."""

from __future__ import annotations

from asyncspec.core.tree import Shape
from asyncspec.policy.base import Growth, Policy, View
from asyncspec_protocol.ids import NodeId


class Pairs(Policy, frozen=True):
    """Two tokens below the last committed one, verified before the next two are drafted."""

    def max_tree_nodes(self, stages: int) -> int:
        return 2

    def grow(self, view: View) -> Growth | None:
        depth = min(2, view.levels_left)
        if view.drafted or view.levels or depth <= 0:
            return None
        return Growth(Shape(depth, 1, depth), adopt=depth, frontier=view.deepest)

    def next_segment(self, view: View) -> tuple[NodeId, ...]:
        return view.unsent


PAIRS = Pairs()
