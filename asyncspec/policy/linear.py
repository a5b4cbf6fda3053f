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
    # Whether its device goes on below a chain that is being verified, as if all of it were right,
    # the next root included (ours). Token by token: what is there when the verdict comes counts.
    ahead: bool = False
    # Nodes for each token of the length: children of a node, and so many times as many in all.
    width: Positive = 1

    @property
    def planned(self) -> bool:
        return self.plan

    def accepts(self, view: View) -> bool:
        return view.pending == 0 and not view.fresh_root

    def grow(self, view: View) -> Growth | None:
        wanted = self._wanted(view)
        if self.ahead and not view.fresh_root:
            # One token more than a chain: the first is a guess of the next root.
            wanted = min(view.levels + 1, view.room) if len(view.drafted) <= wanted else 0
        elif not self.ahead and view.drafts:
            return None
        depth = wanted - view.levels
        if depth <= 0:
            return None
        count = self.width * depth
        frontier = view.deepest if view.levels else ()
        return Growth(Shape(depth, self.width, count), adopt=count, frontier=frontier)

    def cut(self, view: View) -> tuple[NodeId, ...]:
        wanted = self._wanted(view)
        drafted = view.levels >= wanted or (view.barren if self.ahead else view.drafts > 0)
        if not view.fresh_root or not drafted:
            return ()  # a round starts with its draft
        nodes = view.tree.nodes
        end = nodes[view.tree.root].position + wanted
        return tuple([n for n in view.unsent if nodes[n].position <= end])

    def _wanted(self, view: View) -> int:
        """Levels of this round's draft."""
        return min(view.length or self.length, view.room)
