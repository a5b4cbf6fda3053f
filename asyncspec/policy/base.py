"""What a policy is asked, and what it may look at.

A policy is a pure strategy: it decides what to grow, what to send next and when verdicts count.
Everything else (ids, versions, prunes, credit, losses) is the draft machine's business and the
same for all of them, so comparing two papers is a switch.
"""

from __future__ import annotations

from typing import Annotated, Protocol

from msgspec import Meta, Struct

from asyncspec.core.accept import TargetOutput
from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.tree import TokenTree
from asyncspec.source.expand import Shape
from asyncspec_protocol.ids import NodeId
from asyncspec_protocol.limits import MAX_TREE_NODES

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, le=1)]

MAX_LIVE_NODES = MAX_TREE_NODES
"""Nodes of a tree at most, whatever a policy asks for."""


class View(Struct, frozen=True):
    """A session as a policy sees it. The root is a new token, or for those that are ``eager`` the
    prompt's last one, which has been sent or will be."""

    # Live nodes, the root being the tip of the committed path.
    tree: TokenTree
    # Live nodes not sent yet, oldest first; the root may be one of them.
    unsent: tuple[NodeId, ...]
    # Number of live nodes that were sent and have no verdict yet.
    pending: int
    # Number of verify stages.
    stages: int
    # Segments sent since this round began, and trees that were asked for in it and have come.
    segments: int
    drafts: int
    # Tokens committed since the token source was last asked.
    news: int
    # How deep the source was last asked to go.
    last_depth: int
    # True where nothing waits at the first stage: it will soon be idle.
    starving: bool
    # Levels below the root that can still become part of the answer.
    room: int
    # Rows that a segment should have at most: a row must be worth the time that it takes of passes
    # and lines (``asyncspec.core.cost_model``).
    rows: int = PARAMETERS.max_rows
    # Tokens that a draft should have by the first stage's schedule; 0: the policy's own number.
    draft_length: int = 0
    # Levels that the tree below the tip had when the tip last moved.
    begun: int = 0
    # The source has been asked about the tree as it is, and has nothing more to say.
    barren: bool = False

    @property
    def drafted(self) -> tuple[NodeId, ...]:
        """Unsent nodes below the root."""
        return self.unsent[1:] if self.fresh_root else self.unsent

    @property
    def levels(self) -> int:
        """Levels of the tree below its root."""
        return self.tree.bottom - self.tree.nodes[self.tree.root].position

    @property
    def deepest(self) -> tuple[NodeId, ...]:
        """The nodes of the last level, which may be the root alone."""
        bottom = self.tree.bottom
        return tuple([n for n, data in self.tree.nodes.items() if data.position == bottom])

    @property
    def fresh_root(self) -> tuple[NodeId, ...]:
        """The root if it was not sent yet, else nothing."""
        first = self.unsent[:1]  # no live node is older than the root
        return first if first == (self.tree.root,) else ()


class Growth(Struct, frozen=True):
    """A tree to ask the token source for."""

    shape: Shape
    # Most nodes to adopt that the tree does not have yet.
    adopt: int
    # Live nodes it is to hang from; empty: the tip.
    frontier: tuple[NodeId, ...] = ()


class Usual(Struct, frozen=True):
    """What most policies answer: they draft, act on every verdict at once, and are lossless."""

    @property
    def drafts(self) -> bool:
        return True

    @property
    def top_logprobs(self) -> int:
        return 0

    @property
    def planned(self) -> bool:
        return False

    @property
    def coalesce(self) -> bool:
        return False

    @property
    def narrows(self) -> bool:
        return False

    @property
    def eager(self) -> bool:
        return False

    def accepts(self, view: View) -> bool:
        return True

    def choose(self, tree: TokenTree, node: NodeId, output: TargetOutput) -> int:
        return output.token


class Policy(Protocol):
    """The questions. Implementations are frozen structs whose fields are the parameters."""

    @property
    def drafts(self) -> bool:
        """False where no token source is needed."""

    @property
    def top_logprobs(self) -> int:
        """Likeliest tokens wanted with every verdict. Lossless policies want none: 0."""

    @property
    def planned(self) -> bool:
        """True where the first stage may plan when its segments are verified, and how long they are
        (``View.draft_length``)."""

    @property
    def coalesce(self) -> bool:
        """True where segments that wait at a stage may share a pass. The papers give each its own
        turn."""

    @property
    def narrows(self) -> bool:
        """True where what a segment has no room for may come with the next. Then a session that is
        alone sends as many rows as cost little; others' trees would be smaller."""

    @property
    def eager(self) -> bool:
        """True where what is drafted below the prompt's last token may follow the prompt through
        the pipeline. The papers begin to draft with the first token."""

    def most_live(self, stages: int) -> int:
        """Nodes of a session's tree at most, its root not counted: what a pipeline of so many
        stages may have to hold beside prompt and answer. A tree that is full grows no more."""

    def choose(self, tree: TokenTree, node: NodeId, output: TargetOutput) -> int:
        """The token after ``node``. Of lossless policies it is the drawn one."""

    def accepts(self, view: View) -> bool:
        """Whether verdicts that have come are to be acted on now."""

    def grow(self, view: View) -> Growth | None:
        """What to ask the token source for. Asked whenever it is free."""

    def cut(self, view: View) -> tuple[NodeId, ...]:
        """The next segment, from ``view.unsent``, parents first. Asked whenever the first stage
        can take one; empty means: nothing yet."""


def most_live(policy: Policy, stages: int) -> int:
    """Nodes that a session's tree is held to, its root not counted."""
    return min(policy.most_live(stages), MAX_LIVE_NODES)
