"""DiP-SD: a linear draft per round, whose length a plan may set."""

from __future__ import annotations

import math

from asyncspec.policy.base import Growth, Positive, Usual, View
from asyncspec.source.expand import Shape
from asyncspec_protocol.ids import NodeId
from asyncspec_protocol.limits import MAX_DRAFT_LENGTH

LEAST = math.log(0.3)
"""The log of the chance, by the draft, that all so far is right, from which on a device goes on
below it. A miss waits for the token that is being drafted: with less than this it costs more than
a hit brings, where devices are slow."""


class Linear(Usual, frozen=True):
    """A round drafts a chain, all of it and its root are one segment, and the next round begins
    with its verdict: a user drafts while others are verified (DiP-SD, section III)."""

    # Tokens of a draft, where no plan says how many.
    length: Positive = 4
    # Whether the first stage is asked for a plan; else whoever is ready is verified.
    plan: bool = True
    # Whether its device goes on below a chain that is being verified, as if all of it were right,
    # the next root included (ours). What it has then comes on top of the next draft's length: it
    # is ready when a plan expects it, and brings more.
    ahead: bool = False
    # Nodes for each token of the length (ours): above 1 a draft is a tree of as many levels, the
    # best of all children, which few users with poor guesses gain by and crowds lose by.
    width: Positive = 1

    def __post_init__(self) -> None:
        if self.ahead and self.width > 1:
            raise ValueError("ahead needs width=1: below a tree there is no one place to go on")

    @property
    def planned(self) -> bool:
        return self.plan

    def most_live(self, stages: int) -> int:
        """With ``ahead`` a draft, as many tokens that were there when it began, and below both the
        next root with as many again."""
        length = max(self.length, MAX_DRAFT_LENGTH) if self.plan else self.length
        return 3 * length + 1 if self.ahead else length * self.width

    def accepts(self, view: View) -> bool:
        return view.pending == 0 and not view.fresh_root

    def grow(self, view: View) -> Growth | None:
        if not self.ahead and view.drafts:
            return None
        depth = self._wanted(view) - view.levels
        if not view.fresh_root:
            depth = self._further(view) if self.ahead else 0
        if depth <= 0:
            return None
        frontier = view.deepest if view.levels else ()
        count = depth * self.width
        return Growth(Shape(depth, self.width, count), adopt=count, frontier=frontier)

    def cut(self, view: View) -> tuple[NodeId, ...]:
        wanted = self._wanted(view)
        drafted = view.levels >= wanted or (view.barren if self.ahead else view.drafts > 0)
        if not view.fresh_root or not drafted:
            return ()  # a round starts with its draft
        nodes = view.tree.nodes
        end = nodes[view.tree.root].position + wanted
        return tuple([node for node in view.unsent if nodes[node].position <= end])

    def _wanted(self, view: View) -> int:
        """Levels of this round's draft."""
        return min((view.draft_length or self.length) + view.begun, view.room)

    def _further(self, view: View) -> int:
        """Levels to draft below a chain that is being verified: one at a time, for what is there
        when the verdict comes counts, and no more than its root and a draft."""
        nodes = view.tree.nodes
        likely = min(nodes[node].score for node in view.deepest) >= LEAST
        enough = len(view.drafted) > (view.draft_length or self.length)
        return 1 if likely and not enough and view.levels < view.room else 0
