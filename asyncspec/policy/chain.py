"""Linear drafts in flight without a pause: what most pipelines with speculation do today."""

from __future__ import annotations

from asyncspec.policy.base import Count, Growth, Positive, Usual, View
from asyncspec.source.expand import Shape
from asyncspec_protocol.ids import NodeId


class Chain(Usual, frozen=True):
    """A chain of the draft's first choices, cut in chunks of ``k`` tokens. Chunks follow each other
    without waiting for verdicts; a miss flushes all that is in flight.

    With ``k`` = 1 it is the streamed form: every token travels alone, as soon as it is drafted.
    """

    # Tokens of a chunk.
    k: Positive = 4
    # Most chunks ahead of the last certain token; 0: one for each stage and one being drafted.
    ahead: Count = 0
    # Whether what is drafted below the prompt's last token follows the prompt. Ours.
    eager: bool = True

    def most_live(self, stages: int) -> int:
        return (self.ahead or stages + 1) * self.k

    def grow(self, view: View) -> Growth | None:
        depth = min(self.k, min(self.most_live(view.stages), view.room) - view.levels)
        if view.drafted or depth <= 0:
            return None
        return Growth(Shape(depth, 1, depth), adopt=depth, frontier=view.deepest)

    def cut(self, view: View) -> tuple[NodeId, ...]:
        if self.k > 1 and view.room and not view.drafts and not view.drafted:
            return ()  # the round starts with its first chunk
        if self.k == 1:
            return view.unsent[:1]
        return (*view.fresh_root, *view.drafted[: self.k])
