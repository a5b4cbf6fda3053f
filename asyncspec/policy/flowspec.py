"""FlowSpec: continuous tree speculation with score order, pruning and two expansions (III)."""

from __future__ import annotations

from asyncspec.core.tree import Shape, by_level, by_score
from asyncspec.policy.base import Growth, Policy, Positive, View
from asyncspec.policy.chunked import next_piece
from asyncspec_protocol.ids import NodeId


class FlowSpec(Policy, frozen=True):
    """Parameters are named as in the paper; the defaults are its own (section V-A).

    A round starts with a tree of ``l_init`` nodes, sent in equal segments of at most ``l_seg``: one
    for each of the paper's five devices. A longer pipeline gets no shorter ones, which would only
    cost it turns. The tree then grows while it is being verified: context-aware expansion redrafts
    from the new tip after every accepted token and sends the new nodes; score-aware expansion goes
    deeper when nothing was accepted and the pipeline would run dry.
    """

    # Score-based order of a tree's nodes; False is the paper's "w/o SBD" (level order).
    sbd: bool = True
    # Nodes of a round's first tree.
    l_init: Positive = 80
    # Nodes of a segment at most.
    l_seg: Positive = 16
    # Children per node.
    k: Positive = 10
    # Levels of a round's first tree.
    d_init: Positive = 5
    # Context-aware expansion: nodes of the fresh tree.
    l_exp: Positive = 64
    # Context-aware expansion: its levels.
    d_exp: Positive = 5
    # Score-aware expansion: nodes to add.
    l_deep: Positive = 48
    # Score-aware expansion: levels to go deeper.
    d_deep: Positive = 1
    # Levels of a tree at most: deeper nodes are not worth their draft passes.
    d_most: Positive = 12
    # Segments that wait at a stage may share a pass. An extension.
    coalesce: bool = True
    # Draft before the first token is known. An extension.
    speculate_during_prefill: bool = True

    @property
    def limits_rows(self) -> bool:
        return True

    @property
    def waits_for_idle_stage(self) -> bool:
        return True

    def max_tree_nodes(self, stages: int) -> int:
        """A round's first tree, all that can be added before a token is accepted, and a fresh tree.
        The subtree that is left after a hit grows on, so the rules alone give no bound."""
        deeper = max(0, self.d_most - min(self.d_init, self.d_exp)) // self.d_deep
        return self.l_init + deeper * self.l_deep + self.l_exp

    def grow(self, view: View) -> Growth | None:
        if not view.levels_left:
            return None
        if not view.trees_received:
            first = min(self.l_init, self._pieces * view.max_rows)
            return self._growth(view, self.d_init, first, first)
        if view.tokens_since_draft:
            return self._growth(view, self.d_exp, self.l_exp, min(self.l_exp, view.max_rows))
        return self._deeper(view)

    @property
    def _pieces(self) -> int:
        """Number of segments of a round's first tree."""
        return -(-self.l_init // self.l_seg)

    def _deeper(self, view: View) -> Growth | None:
        """Score-aware expansion: more levels below the same tip, the best nodes that are new."""
        depth = view.last_depth + self.d_deep
        if view.unsent or not view.first_stage_idle or depth > min(self.d_most, view.levels_left):
            return None
        count = len(view.tree) - 1
        if count >= self.max_tree_nodes(view.stages):
            return None
        return self._growth(view, depth, count + self.l_deep, self.l_deep)

    def _growth(self, view: View, depth: int, count: int, adopt: int) -> Growth:
        return Growth(Shape(min(depth, view.levels_left), self.k, count), adopt=adopt)

    def next_segment(self, view: View) -> tuple[NodeId, ...]:
        if not view.trees_received and view.levels_left:
            return ()  # a round starts with its tree
        if view.segments < self._pieces and view.trees_received <= 1:
            longest = min(self.l_seg, view.max_rows)
            return next_piece(view, longest, self._pieces, scored=self.sbd)
        order = (by_score if self.sbd else by_level)(view.tree, view.drafted)
        return (*view.fresh_root, *order[: min(self.l_exp, view.max_rows)])


FLOWSPEC_NO_SBD = FlowSpec(sbd=False)
FLOWSPEC = FlowSpec()
