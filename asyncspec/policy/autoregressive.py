"""Plain pipeline parallelism: no draft, one token per pass of the whole pipeline."""

from __future__ import annotations

from asyncspec.policy.base import Growth, Policy, View
from asyncspec_protocol.ids import NodeId


class Autoregressive(Policy, frozen=True):
    """The baseline for every other policy."""

    @property
    def uses_draft(self) -> bool:
        return False

    def max_tree_nodes(self, stages: int) -> int:
        return 0

    def grow(self, view: View) -> Growth | None:
        return None

    def next_segment(self, view: View) -> tuple[NodeId, ...]:
        return view.unsent


AUTOREGRESSIVE = Autoregressive()
