"""Chunk-PP and Pruned PP: one EAGLE-2 tree per round, sent in segments (FlowSpec V-A, V-C)."""

from __future__ import annotations

from asyncspec.core.tree import Shape, by_level, by_score
from asyncspec.policy.base import Count, Growth, Policy, Positive, View
from asyncspec_protocol.ids import NodeId


class Chunked(Policy, frozen=True):
    """A tree per round, sent in segments; the verdicts count when all of them have come.

    With ``early`` it is the paper's "Pruned PP": segments in score order, and every verdict counts
    at once, so that what it rules out is pruned; still one tree per round.
    """

    # Every segment's verdict counts at once and prunes.
    early: bool = False
    # Nodes of a tree (FlowSpec: L_init).
    size: Positive = 80
    # Levels of a tree (d_0).
    depth: Positive = 5
    # Children per node (k).
    width: Positive = 10
    # Longest segment, the root not counted (FlowSpec: L_seg).
    segment: Positive = 16
    # Segments per tree, more where they would be too long; 0: one for each pipeline position.
    pieces: Count = 0
    # Segments that wait at a stage may share a pass. An extension.
    coalesce: bool = False

    def max_tree_nodes(self, stages: int) -> int:
        return self.size

    def accepts_verdicts(self, view: View) -> bool:
        return self.early or (view.pending == 0 and not view.unsent)

    def grow(self, view: View) -> Growth | None:
        if view.trees_received or not view.levels_left:
            return None
        depth = min(self.depth, view.levels_left)
        return Growth(Shape(depth, self.width, self.size), adopt=self.size)

    def next_segment(self, view: View) -> tuple[NodeId, ...]:
        if not view.trees_received and view.levels_left:
            return ()  # a round starts with its tree
        return next_piece(view, min(self.segment, view.max_rows), self.pieces, scored=self.early)


def next_piece(view: View, longest: int, pieces: int = 0, *, scored: bool) -> tuple[NodeId, ...]:
    """The next of ``pieces`` near-equal segments of a round's first tree (FlowSpec III-B).

    0 pieces: one for each pipeline position, the draft node's included. No segment has more than
    ``longest`` nodes, so there may be more of them. A fresh root travels with the first, not
    counted. The size is computed anew each time, because a prune may have removed nodes.
    """
    order = (by_score if scored else by_level)(view.tree, view.drafted)
    size = segment_size(len(order), (pieces or view.stages + 1) - view.segments, longest)
    return (*view.fresh_root, *order[:size])


def segment_size(count: int, pieces: int, longest: int) -> int:
    """Size of the next of ``pieces`` near-equal pieces of ``count`` items, larger ones first, at
    most ``longest``."""
    return min(longest, -(-count // max(1, pieces)))


CHUNKED = Chunked()
PRUNED = Chunked(early=True)
