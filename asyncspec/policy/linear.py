"""DiP-SD: a linear draft per round, whose length a plan may set."""

from __future__ import annotations

import math

from asyncspec.core.tree import Shape
from asyncspec.policy.base import Growth, Policy, Positive, View
from asyncspec_protocol.ids import NodeId
from asyncspec_protocol.limits import MAX_DRAFT_LENGTH

MIN_LOG_CHANCE = math.log(0.3)
"""Log-probability of a chain, by the draft, above which drafting continues below it. A miss waits
for the token that is being drafted; below this it costs more than a hit brings on slow devices."""


class Linear(Policy, frozen=True):
    """A round drafts a chain and sends it with its root as one segment; the next round begins with
    the verdict. A user drafts while others are verified (DiP-SD, section III)."""

    # Tokens of a draft where there is no plan.
    length: Positive = 4
    # Ask the first stage for a plan; else drafts are verified as they come.
    plan: bool = True
    # An extension: continue drafting below a chain that is being verified, as if all of it and the
    # next root were right. Those tokens come on top of the next draft's length.
    ahead: bool = False
    # An extension: nodes per level. Above 1 a draft is a tree, which helps few users with poor
    # drafts and harms many users.
    width: Positive = 1

    def __post_init__(self) -> None:
        if self.ahead and self.width > 1:
            raise ValueError("ahead needs width=1: a tree has no single node to continue from")

    @property
    def plannable(self) -> bool:
        return self.plan

    def max_tree_nodes(self, stages: int) -> int:
        """With ``ahead``: the tokens drafted ahead, the draft, the next root, and as many again."""
        length = max(self.length, MAX_DRAFT_LENGTH) if self.plan else self.length
        return 3 * length + 1 if self.ahead else length * self.width

    def accepts_verdicts(self, view: View) -> bool:
        return view.pending == 0 and not view.fresh_root

    def grow(self, view: View) -> Growth | None:
        if not self.ahead and view.trees_received:
            return None
        depth = self._wanted(view) - view.levels
        if not view.fresh_root:
            depth = self._further(view) if self.ahead else 0
        if depth <= 0:
            return None
        frontier = view.deepest if view.levels else ()
        count = depth * self.width
        return Growth(Shape(depth, self.width, count), adopt=count, frontier=frontier)

    def next_segment(self, view: View) -> tuple[NodeId, ...]:
        wanted = self._wanted(view)
        drafted = view.levels >= wanted or (
            view.no_growth if self.ahead else view.trees_received > 0
        )
        if not view.fresh_root or not drafted:
            return ()  # a round starts with its draft
        nodes = view.tree.nodes
        end = nodes[view.tree.root].position + wanted
        return tuple([node for node in view.unsent if nodes[node].position <= end])

    def _wanted(self, view: View) -> int:
        """Levels of this round's draft."""
        return min((view.draft_length or self.length) + view.initial_depth, view.levels_left)

    def _further(self, view: View) -> int:
        """Levels to draft below a chain that is being verified: one at a time, because only what
        is there when the verdict comes counts; at most the next root and a draft."""
        nodes = view.tree.nodes
        likely = min(nodes[node].score for node in view.deepest) >= MIN_LOG_CHANCE
        enough = len(view.drafted) > (view.draft_length or self.length)
        return 1 if likely and not enough and view.levels < view.levels_left else 0


DIP_SD = Linear()
