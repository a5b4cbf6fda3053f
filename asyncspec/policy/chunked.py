"""Chunk-PP and Pruned PP: one EAGLE-2 tree per round, cut in segments (FlowSpec V-A, V-C)."""

from __future__ import annotations

from asyncspec.core.segment import share
from asyncspec.core.tree import by_level, by_score
from asyncspec.policy.base import Count, Growth, Positive, Usual, View
from asyncspec.source.expand import Shape
from asyncspec_protocol.ids import NodeId


class Chunked(Usual, frozen=True):
    """One tree per round in segments, verified as a whole: the round is synchronous.

    With ``early`` it is the paper's "Pruned PP": score order, and every segment's verdict counts
    at once, so what it rules out is pruned; still one tree per round.
    """

    early: bool = False
    # Nodes of a tree, levels, and children per node (FlowSpec: L_init, d_0, k).
    size: Positive = 80
    depth: Positive = 5
    width: Positive = 10
    # Longest segment, the root not counted (FlowSpec: L_seg).
    segment: Positive = 16
    # Segments a tree is cut into, where none is too long; 0: one for each pipeline position.
    pieces: Count = 0
    # What waits at a stage may share a pass. Ours: the paper's stages do one segment a turn.
    coalesce: bool = False

    def most_live(self, stages: int) -> int:
        return self.size

    def accepts(self, view: View) -> bool:
        return self.early or (view.pending == 0 and not view.unsent)

    def grow(self, view: View) -> Growth | None:
        if view.drafts or not view.room:
            return None
        depth = min(self.depth, view.room)
        return Growth(Shape(depth, self.width, self.size), adopt=self.size)

    def cut(self, view: View) -> tuple[NodeId, ...]:
        if not view.drafts and view.room:
            return ()  # the round starts with its tree
        return next_piece(view, min(self.segment, view.rows), self.pieces, scored=self.early)


def next_piece(view: View, longest: int, pieces: int = 0, *, scored: bool) -> tuple[NodeId, ...]:
    """The next of the ``pieces`` that a round's first tree is cut into, or more; 0: one for each
    pipeline position, the draft node's too. The root travels with the first, not counted.

    The size is worked out anew for what is left, because a prune may have thinned it meanwhile.
    """
    order = (by_score if scored else by_level)(view.tree, view.drafted)
    size = share(len(order), (pieces or view.stages + 1) - view.segments, longest)
    return (*view.fresh_root, *order[:size])
