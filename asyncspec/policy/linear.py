"""DiP-SD: a linear draft per round, whose length a plan may set."""

from __future__ import annotations

from asyncspec.policy.base import Growth, Positive, Usual, View
from asyncspec.source.grow import Shape
from asyncspec_protocol.ids import NodeId


class Linear(Usual, frozen=True):
    """A round drafts a chain, all of it and its root are one segment, and the next round begins
    with its verdict: a user drafts while others are verified (DiP-SD, section III)."""

    # Tokens of a draft, where no plan says how many.
    length: Positive = 4
    # Whether the first stage is asked for a plan; else whoever is ready is verified.
    plan: bool = True

    @property
    def planned(self) -> bool:
        return self.plan

    def accepts(self, view: View) -> bool:
        return view.pending == 0 and not view.unsent

    def grow(self, view: View) -> Growth | None:
        if view.drafts or not view.room:
            return None
        depth = min(view.length or self.length, view.room)
        return Growth(Shape(depth, 1, depth), adopt=depth)

    def cut(self, view: View) -> tuple[NodeId, ...]:
        if not view.drafts and view.room:
            return ()  # the round starts with its draft
        return view.unsent
