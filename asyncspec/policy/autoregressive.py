"""Plain pipeline parallelism: no draft, one token per pass of the whole pipeline."""

from __future__ import annotations

from asyncspec.policy.base import Growth, Usual, View
from asyncspec_protocol.ids import NodeId


class Autoregressive(Usual, frozen=True):
    """The baseline every other policy has to beat, and the simplest loop to read."""

    @property
    def drafts(self) -> bool:
        return False

    def most_live(self, stages: int) -> int:
        return 0

    def grow(self, view: View) -> Growth | None:
        return None

    def cut(self, view: View) -> tuple[NodeId, ...]:
        return view.unsent
