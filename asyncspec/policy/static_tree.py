"""SpecInfer and STPP: a tree of one fixed shape per round, verified at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from asyncspec.core.tree import Shape
from asyncspec.policy.base import Growth, Policy, Positive, View
from asyncspec_protocol.ids import NodeId


class StaticTree(Policy, frozen=True):
    """Synchronous: the draft node waits for the verdict on the whole tree, the pipeline for the
    next tree. The static baseline of PipeDec (4.2) and SpecPipe (4, A.1)."""

    # Children of every node, level by level (SpecInfer: eight levels, the third one wider).
    branching: Annotated[tuple[Positive, ...], Meta(min_length=1)] = (1, 1, 3, 1, 1, 1, 1, 1)

    def max_tree_nodes(self, stages: int) -> int:
        return _size(self.branching)

    def accepts_verdicts(self, view: View) -> bool:
        return view.pending == 0 and not view.unsent

    def grow(self, view: View) -> Growth | None:
        if view.trees_received or not view.levels_left:
            return None
        widths = self.branching[: view.levels_left]
        size = _size(widths)
        shape = Shape(len(widths), max(widths), size, size, fixed_width=True, widths=widths)
        return Growth(shape, adopt=size)

    def next_segment(self, view: View) -> tuple[NodeId, ...]:
        if not view.trees_received and view.levels_left:
            return ()  # a round starts with its tree
        return view.unsent


def _size(widths: Sequence[int]) -> int:
    """Nodes of a tree with ``widths[i]`` children per node of level ``i``."""
    size, level = 0, 1
    for width in widths:
        level *= width
        size += level
    return size


STATIC_TREE = StaticTree()
