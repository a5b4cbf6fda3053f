"""Linear drafts in flight without a pause, as in most pipelines with speculation."""

from __future__ import annotations

from asyncspec.core.tree import Shape
from asyncspec.policy.base import Count, Growth, Policy, Positive, View
from asyncspec_protocol.ids import NodeId


class Chain(Policy, frozen=True):
    """A chain of the draft's first choices, sent in chunks of ``k`` tokens without waiting for
    verdicts; a miss flushes all that is in flight. With ``k`` = 1 every token is sent as soon as it
    is drafted."""

    # Tokens of a chunk.
    k: Positive = 4
    # Chunks ahead of the last committed token at most; 0: one per stage and one being drafted.
    ahead: Count = 0
    # Draft before the first token is known. An extension.
    speculate_during_prefill: bool = True

    def max_tree_nodes(self, stages: int) -> int:
        return (self.ahead or stages + 1) * self.k

    def grow(self, view: View) -> Growth | None:
        depth = min(self.k, min(self.max_tree_nodes(view.stages), view.levels_left) - view.levels)
        if view.drafted or depth <= 0:
            return None
        return Growth(Shape(depth, 1, depth), adopt=depth, frontier=view.deepest)

    def next_segment(self, view: View) -> tuple[NodeId, ...]:
        if self.k > 1 and view.levels_left and not view.trees_received and not view.drafted:
            return ()  # a round starts with its first chunk
        if self.k == 1:
            return view.unsent[:1]
        return (*view.fresh_root, *view.drafted[: self.k])


CHAIN = Chain()
CHAIN_STREAMED = Chain(k=1)
