"""FlowSpec: continuous tree speculation with score order, pruning and two expansions (III)."""

from __future__ import annotations

from asyncspec.core.tree import by_level, by_score
from asyncspec.policy.base import Growth, Positive, Usual, View
from asyncspec.policy.chunked import next_piece
from asyncspec.source.expand import Shape
from asyncspec_protocol.ids import NodeId


class FlowSpec(Usual, frozen=True):
    """Parameters are named as in the paper; the defaults are its own (section V-A).

    A round starts with a tree of ``l_init`` nodes, cut into equal segments of at most ``l_seg``:
    one for each of the paper's five devices; a longer pipeline gets no shorter ones, which would
    only cost it turns. From then on the tree grows while it is being verified: context-aware after
    every accepted token, which redrafts from the new tip and sends what is new; score-aware when
    nothing was accepted and the pipeline would run dry, which goes deeper.
    """

    # Score-based order of a tree's nodes; False is the paper's "w/o SBD" (level order).
    sbd: bool = True
    l_init: Positive = 80
    l_seg: Positive = 16
    k: Positive = 10
    d_init: Positive = 5
    # Context-aware expansion: nodes of the fresh tree and its levels.
    l_exp: Positive = 64
    d_exp: Positive = 5
    # Score-aware expansion: nodes to add and levels to go deeper.
    l_deep: Positive = 48
    d_deep: Positive = 1
    # A deeper tree than this is not worth its draft passes.
    d_most: Positive = 12
    # What waits at a stage may share a pass. Ours: the paper's stages do one segment a turn.
    coalesce: bool = True
    # Whether what is drafted below the prompt's last token follows the prompt. Ours.
    eager: bool = True

    @property
    def narrows(self) -> bool:
        return True

    def most_live(self, stages: int) -> int:
        """A round's first tree with all that can be added to it before anything is accepted, and a
        fresh one. No more follows from the rules: what every hit leaves of the tree grows on."""
        deeper = max(0, self.d_most - min(self.d_init, self.d_exp)) // self.d_deep
        return self.l_init + deeper * self.l_deep + self.l_exp

    def grow(self, view: View) -> Growth | None:
        if not view.room:
            return None
        if not view.drafts:
            first = min(self.l_init, self._pieces * view.rows)
            return self._growth(view, self.d_init, first, first)
        if view.news:
            return self._growth(view, self.d_exp, self.l_exp, min(self.l_exp, view.rows))
        return self._deeper(view)

    @property
    def _pieces(self) -> int:
        """Segments of a round's first tree."""
        return -(-self.l_init // self.l_seg)

    def _deeper(self, view: View) -> Growth | None:
        """Score-aware expansion: the same context, more levels, the best nodes not yet known."""
        depth = view.last_depth + self.d_deep
        if view.unsent or not view.starving or depth > min(self.d_most, view.room):
            return None
        known = len(view.tree) - 1
        if known >= self.most_live(view.stages):
            return None
        return self._growth(view, depth, known + self.l_deep, self.l_deep)

    def _growth(self, view: View, depth: int, count: int, adopt: int) -> Growth:
        return Growth(Shape(min(depth, view.room), self.k, count), adopt=adopt)

    def cut(self, view: View) -> tuple[NodeId, ...]:
        if not view.drafts and view.room:
            return ()  # the round starts with its tree
        if view.segments < self._pieces and view.drafts <= 1:
            longest = min(self.l_seg, view.rows)
            return next_piece(view, longest, self._pieces, scored=self.sbd)
        order = (by_score if self.sbd else by_level)(view.tree, view.drafted)
        return (*view.fresh_root, *order[: min(self.l_exp, view.rows)])
