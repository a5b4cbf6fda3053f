"""The interface between a policy and the draft machine.

A policy is a pure strategy: it decides what to grow, what to send next and when verdicts count.
Ids, versions, prunes, credit and losses are handled by the draft machine, the same for all
policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from asyncspec.core.accept import TargetOutput
from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.cost_model.pipeline import PipelineCosts
from asyncspec.core.tree import Shape, TokenTree
from asyncspec_protocol.ids import NodeId, SegmentId
from asyncspec_protocol.limits import MAX_TREE_NODES

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, le=1)]


class View(Struct, frozen=True):
    """A session as a policy sees it.

    The root is a new token, or with ``speculate_during_prefill`` the prompt's last one, which has
    been sent or will be.
    """

    # Live nodes, the root being the tip of the committed path.
    tree: TokenTree
    # Live nodes not sent yet, oldest first; may include the root.
    unsent: tuple[NodeId, ...]
    # Live nodes that were sent, with their segments.
    sent: Mapping[NodeId, SegmentId]
    # Number of live nodes that were sent and have no verdict yet.
    pending: int
    # Number of verify stages.
    stages: int
    # Segments sent and trees received in this round.
    segments: int
    trees_received: int
    # Tokens committed since the last draft request.
    tokens_since_draft: int
    # Levels of the last draft request.
    last_depth: int
    # Nothing waits at the first stage: it will soon be idle.
    first_stage_idle: bool
    # Levels below the root that can still become part of the answer.
    levels_left: int
    # Rows of a segment at most, by what a row costs (``asyncspec.core.cost_model``).
    max_rows: int = PARAMETERS.max_rows
    # Tokens of a draft by the first stage's schedule; 0: the policy's own number.
    draft_length: int = 0
    # Levels below the tip when the tip last moved.
    initial_depth: int = 0
    # The last draft request about this very tree brought no new node.
    no_growth: bool = False
    # Nodes whose successors the source was not asked for: those of a request's last level, and a
    # lookup's copy below it.
    unasked: frozenset[NodeId] = frozenset()
    # What the policy has learned on this draft node (``Policy.learn``).
    memory: object = None

    @property
    def drafted(self) -> tuple[NodeId, ...]:
        """Unsent nodes below the root."""
        return self.unsent[1:] if self.fresh_root else self.unsent

    @property
    def segments_in_flight(self) -> int:
        """Segments with live nodes whose verdicts are still to come."""
        return len(set(self.sent.values()))

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
    """A draft request."""

    shape: Shape
    # New nodes to adopt at most.
    adopt: int
    # Live nodes to grow below; empty: the tip.
    frontier: tuple[NodeId, ...] = ()
    # By chances as they came true, where the source learns them; else as it states them.
    calibrated: bool = False


class Drafted(Struct, frozen=True):
    """A draft request was answered."""

    # Seconds of a level of the call it was part of, which drafted for so many ``sessions``.
    level_seconds: float
    costs: PipelineCosts
    sessions: int = 1
    # Mean rows of a level, of all sessions.
    rows: float = 1.0
    # From the request to the answer, beside the levels.
    call_seconds: float = 0.0
    # It was abandoned amid some level: one takes at most so many seconds.
    abandoned: bool = False


class Committed(Struct, frozen=True):
    """The target has chosen ``tokens`` after the root of ``tree``."""

    tree: TokenTree
    tokens: tuple[int, ...]
    costs: PipelineCosts
    # Since the session's last commit; 0: these are its first tokens, or another session's prompt
    # was read meanwhile.
    seconds: float = 0.0
    # Whether nodes below the root had been sent.
    speculated: bool = False
    # Sessions that decode, this one among them.
    sessions: int = 1


class Policy(Struct, frozen=True):
    """A policy's decisions; its fields are its parameters. The defaults are those of a lossless
    policy that drafts and acts on every verdict at once."""

    @property
    def uses_draft(self) -> bool:
        """False where no token source is needed."""
        return True

    @property
    def top_logprobs(self) -> int:
        """Likeliest tokens wanted with every verdict; 0 for lossless policies."""
        return 0

    @property
    def plannable(self) -> bool:
        """The first stage may plan when its segments are verified, and how long they are
        (``View.draft_length``)."""
        return False

    @property
    def coalesce(self) -> bool:
        """Segments that wait at a stage may share a pass. The papers give each its own turn."""
        return False

    @property
    def limits_rows(self) -> bool:
        """Nodes for which a segment has no room travel in a later one, so a lone session may be
        limited to the rows that cost little. Other policies would get smaller trees."""
        return False

    @property
    def plans_rows(self) -> bool:
        """It weighs the rows of all sessions itself. The segments of others that share passes get a
        tree budget (SpecPipe 4.4), which knows what a row costs, but not how long its verdict
        takes."""
        return False

    @property
    def speculate_during_prefill(self) -> bool:
        """Drafts below the prompt's last token follow the prompt through the pipeline. The papers
        begin to draft with the first token."""
        return False

    @property
    def waits_for_idle_stage(self) -> bool:
        """It reads ``View.first_stage_idle``: credit is news to it also where some was left."""
        return False

    def accepts_verdicts(self, view: View) -> bool:
        """Whether the verdicts received so far take effect now."""
        return True

    def choose(self, tree: TokenTree, node: NodeId, output: TargetOutput) -> int:
        """The token after ``node``; the sampled one for lossless policies."""
        return output.token

    def max_tree_nodes(self, stages: int) -> int:
        """Nodes of a session's tree at most, without its root. A full tree grows no more. Raises
        ``NotImplementedError`` where a policy has none of its own."""
        raise NotImplementedError

    def learn(self, memory: object, event: Drafted | Committed) -> object:
        """What all sessions of the policy and of one kind of sampling know from now on
        (``View.memory``); None at first."""
        return memory

    def carried(self, memory: object, latest: object) -> object:
        """What sessions know of one kind of sampling (``Sampling.kind``; ``memory``, None at first)
        after ``latest`` was learned by sessions of another."""
        return memory

    def stats(self, memory: object) -> Mapping[str, float]:
        """What it has learned and does, for the statistics of a request."""
        return {}

    def grow(self, view: View) -> Growth | None:
        """The next draft request; None: none. Called whenever the token source is free. Raises
        ``NotImplementedError`` where a policy has none of its own."""
        raise NotImplementedError

    def next_segment(self, view: View) -> tuple[NodeId, ...]:
        """The nodes of the next segment, from ``view.unsent``, parents first; empty: none yet.
        Called whenever the first stage can take one. Raises ``NotImplementedError`` where a policy
        has none of its own."""
        raise NotImplementedError


def max_tree_nodes(policy: Policy, stages: int) -> int:
    """Nodes of a session's tree at most, without its root: the policy's bound or the protocol's."""
    return min(policy.max_tree_nodes(stages), MAX_TREE_NODES)
