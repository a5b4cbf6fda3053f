"""State of the draft node: queued requests, sessions and the pipeline."""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.accept import TargetOutput
from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.cost_model.pipeline import PipelineCosts, RoundTripProbe
from asyncspec.core.feature_log import FeatureLog
from asyncspec.core.jobs import TensorRows
from asyncspec.core.kv_slots import whole_blocks
from asyncspec.core.machine import Request
from asyncspec.core.stats import Counters, SlotClock
from asyncspec.core.tree import TokenTree
from asyncspec.policy.base import Committed, Drafted, Growth, Policy, View, max_tree_nodes
from asyncspec_nodes.roles.draft.config import DraftConfig
from asyncspec_nodes.roles.draft.measurements import DraftMeasurements
from asyncspec_nodes.roles.draft.memory_bound import MemoryBound
from asyncspec_protocol.ids import NodeId, Rank, SegmentId, SessionId, Version
from asyncspec_protocol.messages import Expand, PromptLogprobs, Rates

FIRST = Rank(1)

MAX_MEMORIES = 16
"""Policies, each with its parameters and a kind of sampling, whose memory is kept."""


def slots_needed(request: Request, policy: Policy, stages: int) -> int:
    """The most cache slots of a request on any stage: prompt, answer and largest tree."""
    answer = request.max_new_tokens
    return whole_blocks(len(request.prompt) + answer + max_tree_nodes(policy, stages))


class QueuedRequest(Struct, frozen=True):
    """A request that waits for a session, with what it has brought so far."""

    request: Request
    counters: Counters
    given: tuple[int, ...] = ()
    # A session that is reading a common prefix of its prompt, for which it waits.
    pending_prefix: SessionId | None = None
    # The stages have read what they had of its prompt on disk.
    disk_asked: bool = False

    @property
    def prompt_logprobs(self) -> int:
        """As in ``Open``. Not -1 until the first token is given."""
        return -1 if self.given else self.request.prompt_logprobs


MemoryName = tuple[str, tuple[int, bool, bool, bool]]
"""A policy and a kind of sampling."""


class DraftRequest(Struct, frozen=True):
    """What the token source is working on for a session."""

    job: Expand
    # None: it only reads.
    growth: Growth | None
    # Version, round, pipeline slot and length of the committed path at the request.
    version: Version
    round: int
    slot: float
    length: int
    # When it was sent.
    at: float = 0.0
    # The tree it grows is below a tip that is gone.
    abandoned: bool = False


class DraftSession(Struct, frozen=True):
    """The state of one session. Prompt nodes have the ids 0..len(prefix)-1."""

    session: SessionId
    request: Request
    policy: Policy
    stages: int
    # Its prompt: the user's, and tokens of earlier sessions of this request (also ``resumed``).
    prefix: tuple[int, ...]
    resumed: tuple[int, ...]
    tree: TokenTree
    # Live nodes not sent yet, oldest first.
    unsent: tuple[NodeId, ...]
    # The session whose prompt this one begins with; -1: none.
    parent_session: SessionId
    # The node before the root on the committed path.
    root_parent: NodeId
    next_node: NodeId
    # Tokens given to the user by this session.
    committed: tuple[int, ...] = ()
    # When the last of them were; 0: there is none.
    committed_at: float = 0.0
    # Prompt nodes sent so far, and rows of the chunks they are sent in; 0: not known yet.
    prefilled: int = 0
    chunk_rows: int = 0
    # As ``kept_state`` has it.
    kept_state: int = 0
    # It ends before its last tokens: the stages may have gone beyond.
    is_cut: bool = False
    # Live nodes that were sent, with their segments, and the verdicts of live nodes.
    sent: Mapping[NodeId, SegmentId] = {}
    verified: Mapping[NodeId, TargetOutput] = {}
    next_segment: SegmentId = SegmentId(0)
    version: Version = Version(0)
    # Committed nodes that some stage may not know as such, with the version that said so.
    announced: tuple[tuple[NodeId, Version], ...] = ()
    # Smallest version that every stage had applied when the last verdict passed it.
    acknowledged: Version = Version(0)
    # The token source: its work, the tokens of the path it has, the levels of the last request.
    draft_request: DraftRequest | None = None
    source_length: int = 0
    last_depth: int = 0
    # Number of the last draft batch it was in: the longest waiting are the first in the next one.
    draft_batch: int = 0
    # The last request that brought nothing: it is not repeated while the tree is the same.
    no_growth: tuple[Growth, Version, NodeId] | None = None
    # As in ``View``.
    unasked: frozenset[NodeId] = frozenset()
    # None where the token source reads no features of the target.
    features: FeatureLog | None = None
    # Rounds begun after the one whose root is the prompt's last token.
    round: int = 0
    # Segments sent and trees received in this round.
    segments: int = 0
    drafts: int = 0
    # The first of these segments, while its verdict has not come.
    probe: RoundTripProbe | None = None
    # Levels below the tip when it last moved.
    initial_depth: int = 0
    clock: SlotClock = SlotClock()
    # Rows its next segment should have at most, and those of the last one.
    tree_budget: int = PARAMETERS.max_rows
    rows: int = 0
    # Tokens of its drafts by the first stage's plan, 0: none; the rates reported last; when
    # its last segment was sent.
    planned_length: int = 0
    reported: Rates | None = None
    sent_at: float = 0.0
    # Log-probabilities of its prompt, in parts, until the first token.
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    # A node has ended it, as after the loss of a neighbour: the report of a break follows.
    break_expected: bool = False
    counters: Counters = Counters()

    @property
    def given(self) -> tuple[int, ...]:
        """All new tokens the user has."""
        return self.resumed + self.committed

    @property
    def is_unproven(self) -> bool:
        """Whether it may still do what its predecessor may have done: break the pipeline."""
        given = len(self.resumed) + len(self.committed)
        return not self.committed or given < self.counters.tokens_to_prove

    @property
    def new_tokens(self) -> int:
        """Number of tokens given."""
        return len(self.resumed) + len(self.committed)

    @property
    def decoding(self) -> bool:
        """Whether its prompt has been read: its first token is there."""
        return bool(self.committed)

    @property
    def length(self) -> int:
        """Tokens on the committed path."""
        return len(self.prefix) + len(self.committed)

    @property
    def source_limit(self) -> int:
        """Tokens of the committed path that the token source can take."""
        return self.length if self.features is None else self.features.source_limit

    @property
    def slots(self) -> int:
        """The most cache slots it takes on any stage, in whole blocks."""
        return slots_needed(self.request, self.policy, self.stages)

    @property
    def top_logprobs(self) -> int:
        """Likeliest tokens with every verdict, for its policy, else for its user."""
        return self.policy.top_logprobs or self.request.top_logprobs

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are requested and not given yet."""
        return self.request.prompt_logprobs >= 0 and not self.resumed

    @property
    def scored(self) -> int:
        """Prompt tokens whose log-probabilities have come."""
        return sum([len(part.log_probs) for part in self.prompt_logprobs])

    @property
    def last_position(self) -> int:
        """The deepest position whose verdict can still be part of the answer."""
        return len(self.request.prompt) + max(1, self.request.max_new_tokens) - 2

    def path(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens of the committed path at positions [start, end); costs no more than these."""
        length = len(self.prefix)
        if start >= length:
            return self.committed[start - length : end - length]
        return self.prefix[start:end] + self.committed[: max(0, end - length)]

    def truncated(self, kept: int) -> DraftSession:
        """The session, over now, as if it had given only the first ``kept`` tokens."""
        resumed = self.resumed[:kept]
        committed = self.committed[: kept - len(resumed)]
        cut = self.is_cut or committed != self.committed
        return replace(self, resumed=resumed, committed=committed, is_cut=cut)


class FinishingRequest(Struct, frozen=True):
    """A request whose last tokens are out; the stages ``missing`` still owe statistics."""

    session: DraftSession
    reason: str
    ended_at: float
    missing: frozenset[Rank]


class CachedPrompt(Struct, frozen=True):
    """A prompt that the stages hold, and its answer, named by the session that has read it."""

    session: SessionId
    prefix: tuple[int, ...]
    # Tokens of the prompt, and how many of ``prefix`` every stage is known to hold.
    prompt_length: int
    held: int
    # Only requests of this tenant may begin with it.
    tenant: str
    # Stages that have still to report that they hold all of it; ``DRAFT``: this node, whose disk
    # has its features.
    missing: frozenset[Rank] = frozenset()
    # Features of the first positions, in order; None where the session read none.
    features: tuple[TensorRows, ...] | None = None
    # Rows that they hold in memory, as in ``FeatureLog``.
    retained: int = 0
    # With recurrent layers a session may begin after so many tokens of it alone; as the last of
    # these where it ends, and that is held.
    kept_state: int = 0
    is_cut: bool = False
    # It is dropped as soon as no session that begins with it is being opened.
    unused: bool = False
    # From disk: slots that some stage may have filled.
    stored_slots: int = 0

    @property
    def slots(self) -> int:
        """Its cache slots on every stage, in whole blocks."""
        return whole_blocks(max(self.stored_slots, len(self.prefix) - 1))


class PendingRelease(Struct, frozen=True):
    """A closed session, or its cached prompt, whose slots are not free on all stages yet."""

    session: SessionId
    slots: int
    missing: frozenset[Rank]
    is_prompt: bool = False


class DraftState(Struct, frozen=True):
    """State of the draft node. Mappings are never changed in place."""

    config: DraftConfig
    next_session: SessionId
    backlog: tuple[QueuedRequest, ...] = ()
    # In order of service: the first to have credit is the one that has waited longest.
    sessions: Mapping[SessionId, DraftSession] = {}
    finishing: Mapping[SessionId, FinishingRequest] = {}
    # Prompts of sessions that are over, the oldest first.
    cached_prompts: tuple[CachedPrompt, ...] = ()
    # Prompts that stages are reading from disk.
    restoring: Mapping[SessionId, CachedPrompt] = {}
    # Features that this node's own disk is taking, and stages that have a disk cache.
    feature_writes: int = 0
    storing_stages: frozenset[Rank] = frozenset()
    pending_releases: tuple[PendingRelease, ...] = ()
    peers: frozenset[Rank] = frozenset()
    # Stages whose link to the next one is up.
    ready: frozenset[Rank] = frozenset()
    # Stages that are about to report a break this node has seen itself, because it has lost the
    # next stage: with the first session opened since. An answer to its ``Floor`` ends that.
    break_echoes: Mapping[Rank, SessionId] = {}
    # Which requests are too long for the stages' memory, as their ends have shown.
    memory_bound: MemoryBound = MemoryBound()
    # When the pipeline broke last: a peer that has been silent since before it is part of it.
    last_break: float = -math.inf
    # The last crash that each stage has reported.
    crashes: Mapping[Rank, int] = {}
    # Reported cache slots of the stages and of a token source's node; 0: no bound.
    slots: Mapping[Rank, int] = {}
    # By stage: the layers [first, end) there, and the kind of processor that computes them.
    processors: Mapping[Rank, tuple[tuple[int, int], str]] = {}
    # Stages that answer a ``Floor``, and so report what is free there.
    floor_aware: frozenset[Rank] = frozenset()
    # What policies have learned, by name and parameters and kind of sampling; the latest is last.
    memories: Mapping[MemoryName, object] = {}
    # What passes and links cost, and what plans are made from.
    costs: PipelineCosts = PipelineCosts()
    measured: DraftMeasurements = DraftMeasurements()
    # Segments the first stage allows in all on this link, and those sent.
    allowed: int = 0
    sent: int = 0
    # Segments the first stage allows to wait, those on the link not counted.
    window: int = 0
    # Verdicts of one pass that are still to come: what they allow to send belongs together.
    expected_verdicts: int = 0
    # After the last input all credit was used up.
    out_of_credit: bool = True
    # What a token source on a node of its own reads of the target; empty while it is not linked.
    source_features: tuple[int, ...] = ()
    # The token source of this device works on a batch, and the number of batches so far.
    source_busy: bool = False
    draft_batches: int = 0

    @property
    def up(self) -> bool:
        """True while every stage is reachable and linked to the next, and the source is there."""
        stages = frozenset(Rank(r) for r in range(1, self.config.stages + 1))
        source = self.config.source
        has_features = bool(self.source_features) or not self.config.awaits_features
        there = source is None or (source in self.peers and has_features)
        return stages <= self.peers & self.ready and there

    @property
    def features(self) -> tuple[int, ...]:
        """What the token source reads of the target, as in ``Open.features``."""
        return self.config.features or self.source_features

    @property
    def linked_stages(self) -> tuple[Rank, ...]:
        """The stages this node is linked to, in order."""
        return tuple(sorted(rank for rank in self.peers if rank <= self.config.stages))

    @property
    def layer_processors(self) -> tuple[tuple[int, str], ...]:
        """The kinds of processors along the layers, each with the end of its layers: the same for
        every cut among like ones. Empty where a stage's kind is not known."""
        spans: dict[int, str] = {}
        previous = ""
        for rank in range(1, self.config.stages + 1):
            (_, end), kind = self.processors.get(Rank(rank), ((0, 0), ""))
            if not kind:
                return ()
            if kind == previous:
                spans.popitem()
            spans[end], previous = kind, kind
        return tuple(spans.items())

    def with_session(self, session: DraftSession) -> DraftState:
        """The state with a session as it is now; a new one is the last to be served."""
        return replace(self, sessions={**self.sessions, session.session: session})

    def without_session(self, session: SessionId) -> DraftState:
        """The state without a session."""
        return replace(self, sessions={k: v for k, v in self.sessions.items() if k != session})

    def prompts_beside(self, session: SessionId, since: float) -> bool:
        """Whether another session's prompt was read then, or is now."""
        others = [other for name, other in self.sessions.items() if name != session]
        return any((other.counters.first_token or math.inf) > since for other in others)

    def view(self, session: DraftSession) -> View:
        """A session as its policy sees it."""
        tree, unchanged = session.tree, (session.version, session.next_node)
        waits = session.policy.waits_for_idle_stage
        return View(
            tree=tree,
            unsent=session.unsent,
            pending=len(session.sent) - len(session.verified),
            sent=session.sent,
            stages=session.stages,
            segments=session.segments,
            trees_received=session.drafts,
            tokens_since_draft=session.length - session.source_length,
            last_depth=session.last_depth,
            first_stage_idle=waits and self.allowed - self.sent >= self.window,
            levels_left=max(0, session.last_position - tree.nodes[tree.root].position),
            max_rows=session.tree_budget,
            draft_length=session.planned_length,
            initial_depth=session.initial_depth,
            no_growth=session.no_growth is not None and session.no_growth[1:] == unchanged,
            unasked=session.unasked,
            memory=self.memory(session),
        )

    def memory(self, session: DraftSession) -> object:
        """What a session's policy has learned."""
        name = _memory_name(session)
        latest = next((key for key in [*self.memories][::-1] if key[0] == name[0]), name)
        memory = self.memories.get(name)
        if latest == name:
            return memory
        return session.policy.carried(memory, self.memories[latest])

    def learn(self, session: DraftSession, event: Drafted | Committed) -> DraftState:
        """Let a session's policy learn, for all sessions that have it."""
        name, previous = _memory_name(session), self.memory(session)
        memory = session.policy.learn(previous, event)
        if memory is previous:
            return self
        # A user may name a policy with any parameters: those used last are kept.
        others = [pair for pair in self.memories.items() if pair[0] != name][1 - MAX_MEMORIES :]
        return replace(self, memories=dict([*others, (name, memory)]))

    def may_speculate(self, session: DraftSession) -> bool:
        """Whether a session's tree may grow: it decodes, or is alone and its policy guesses."""
        lone = self.config.sole and len(self.sessions) == 1
        return session.decoding or (lone and session.policy.speculate_during_prefill)


def _memory_name(session: DraftSession) -> MemoryName:
    return session.request.policy, session.request.sampling.kind
