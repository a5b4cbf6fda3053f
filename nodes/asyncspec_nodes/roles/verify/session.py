"""State of a verify stage: sessions, queued segments and passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.cost_model.passes import PassCost
from asyncspec.core.cost_model.return_time import ReturnTime
from asyncspec.core.jobs import Batch, Compact, Forward, TensorRows
from asyncspec.core.kv_slots import SlotTable, allocate, orphan, reclaim
from asyncspec.core.liveness import Liveness
from asyncspec.core.machine import Send
from asyncspec_nodes.roles.verify.batch_schedule import BatchSchedule
from asyncspec_nodes.roles.verify.config import VerifyConfig
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import NodeId, Rank, SegmentId, SessionId, Version, is_draft, owner
from asyncspec_protocol.limits import (
    MAX_HEADER_BYTES,
    MAX_NODES,
    MAX_SECONDS,
    MAX_TENSOR_BYTES,
    MAX_TREE_NODES,
)
from asyncspec_protocol.messages import Fault, Open, PruneIndices

_NODE_BYTES, _LIKELIEST_BYTES = 40, 14
"""Upper bounds on a verdict header's bytes: per node, and per likeliest token of a node."""

_RANK_BYTES = 9

_HEADER_BYTES = 256
"""Upper bound on a verdict header's remaining bytes."""


class LinkCredit(Struct, frozen=True):
    """The credit of one inbound link, since it came up, in segments."""

    # What the peer may have sent in all, and what came.
    granted: int = 0
    received: int = 0
    # Credit beyond the window: what the link itself holds (bandwidth-delay product).
    extra: int = 0
    # Sent at once and still to come (``Segment.batch_remaining``): they belong in one pass.
    expected: int = 0


class Watermarks(Struct, frozen=True):
    """Which session ids of one draft node are over, whatever becomes of its links."""

    # Highest id ever opened; what is below and not open is over.
    opened: SessionId = SessionId(-1)
    # Closed before their ``Open`` had come down the pipeline.
    closed_early: frozenset[SessionId] = frozenset()
    # Ids below are over, by the draft node's ``Floor``.
    floor: SessionId = SessionId(0)


class SlotShare(Struct, frozen=True):
    """Cache slots for a draft node, as last reported to it, 0: no bound. What it has opened by an
    earlier, larger share may come ``until`` some time."""

    slots: int = 0
    earlier: int = 0
    until: float = 0.0

    def most(self, now: float) -> int:
        """The share that what comes now may go by."""
        return max(self.slots, self.earlier) if now < self.until else self.slots

    def then(self, slots: int, now: float, seconds: float) -> SlotShare:
        """The share after another report, which takes effect within ``seconds``."""
        if slots >= self.slots:
            return replace(self, slots=slots)
        return SlotShare(slots, self.most(now), now + seconds)


class QueuedSegment(Struct, frozen=True):
    """A segment at this stage, without its dead rows."""

    session: SessionId
    segment: SegmentId
    applied: Version
    ids: tuple[NodeId, ...]
    parents: tuple[NodeId, ...]
    tokens: tuple[int, ...] = ()
    # One row per node, [H] or [1 + auxiliary states, H]; None on the first stage.
    hidden: TensorRows | None = None
    # Passes that could have taken it and did not.
    passed_over: int = 0
    # When it came, and seconds at earlier stages.
    since: float = 0.0
    earlier_seconds: float = 0.0
    # As in ``Segment``.
    pass_number: int = 0
    scored_tokens: tuple[int, ...] = ()

    def stage_seconds(self, now: float) -> float:
        """Seconds at all stages so far, no more than may travel: a peer may say anything of those
        before."""
        return min(MAX_SECONDS, self.earlier_seconds + now - self.since)

    def select(self, rows: Sequence[int]) -> QueuedSegment:
        """The same segment with only these rows (indices into ``ids``, ascending)."""
        if len(rows) == len(self.ids):
            return self
        hidden = self.hidden
        if hidden is not None:
            hidden = TensorRows(hidden.handle, tuple([hidden.rows[i] for i in rows]))
        return replace(
            self,
            ids=tuple([self.ids[i] for i in rows]),
            parents=tuple([self.parents[i] for i in rows]),
            tokens=tuple([self.tokens[i] for i in rows]) if self.tokens else (),
            hidden=hidden,
        )


class PassPart(Struct, frozen=True):
    """A segment in a pass."""

    segment: QueuedSegment
    job: Forward


class Pass(Struct, frozen=True):
    """A forward pass over segments of one or more sessions, those of a session in order."""

    parts: tuple[PassPart, ...]
    job: Forward | Batch
    started: float = 0.0
    # All of its rows are dead, and the device was to end it.
    abandoned: bool = False

    def has(self, session: SessionId) -> bool:
        """Whether a segment of a session is in it."""
        return any(part.segment.session == session for part in self.parts)


class NextPass(Struct, frozen=True):
    """A pass that has not started; the queue and each session's slots once it has."""

    planned: Pass
    queue: tuple[QueuedSegment, ...]
    slots: Mapping[SessionId, SlotTable]


def tree_nodes_of(opening: Open) -> int:
    """Nodes of a session's tree at most: of one whose size is not given, those of the largest."""
    return MAX_TREE_NODES if opening.max_tree_nodes < 0 else opening.max_tree_nodes


def slots_of(opening: Open) -> int:
    """Slots of prompt, answer and tree that a session may take."""
    return opening.capacity + tree_nodes_of(opening)


def max_rows(opening: Open, row_bytes: int) -> int:
    """Rows of a segment at most: what is sent of them fits a frame, which may be hidden states with
    auxiliary ones behind them, features, or likeliest tokens. ``row_bytes``: of hidden states."""
    header = _NODE_BYTES + _LIKELIEST_BYTES * opening.top_logprobs
    if opening.prompt_logprobs >= 0:
        header += _RANK_BYTES + _LIKELIEST_BYTES * (1 + opening.prompt_logprobs)
    tensor = row_bytes * (1 + len(opening.features))
    rows = (MAX_HEADER_BYTES - _HEADER_BYTES) // header
    return min(MAX_NODES, rows, MAX_TENSOR_BYTES // max(1, tensor))


class StageSession(Struct, frozen=True):
    """The state of one session, and what was spent on it."""

    opening: Open
    liveness: Liveness
    slots: SlotTable = SlotTable()
    # Tokens travel with its segments, because the last stage's draws depend on them.
    tokens_travel: bool = False
    # Upper bound on rows per segment.
    max_rows: int = MAX_NODES
    # Passes, and of these those that were not abandoned.
    passes: int = 0
    finished_passes: int = 0
    rows: int = 0
    # Rows whose node was dead when their pass ended.
    dead_rows: int = 0
    compute_seconds: float = 0.0
    # First stage only.
    returns: ReturnTime = ReturnTime()

    @property
    def max_tree_nodes(self) -> int:
        """Nodes of its tree at most."""
        return tree_nodes_of(self.opening)

    @property
    def max_slots(self) -> int:
        """Slots of prompt, answer and tree at most."""
        return slots_of(self.opening)

    def scored_rows(self, ids: Sequence[NodeId]) -> int:
        """Rows of a segment whose successors, tokens of the prompt, are scored: its first ones, as
        no prompt token is ever dead."""
        if self.opening.prompt_logprobs < 0:
            return 0
        return max(0, min(len(ids), self.liveness.prompt_length - 1 - ids[0]))

    def aux_states(self, layers: int) -> int:
        """Hidden states of the first ``layers`` layers that a row brings for the token source."""
        return sum(0 <= depth <= layers for depth in self.opening.features) if layers else 0


class StoredText(Struct, frozen=True):
    """A session's prompt, once it is kept with its answer, that is to be stored by the names of its
    beginnings."""

    keys: tuple[bytes, ...]
    # Tokens of the prompt that another text may go on from: a part ends there.
    border: int
    # Tokens that are stored already; -1: not known.
    stored: int = -1


class StoredPrefixes(Struct, frozen=True):
    """What goes to the disk cache, and what is read from it (``stored_prefixes``)."""

    # By session, those that came first before others.
    queue: Mapping[SessionId, StoredText] = {}
    # The one that an effect or a job is under way for.
    busy: SessionId | None = None
    # Prompts that were not stored, because too many waited or the disk did not take them.
    dropped: int = 0
    # Slots of what is being read, by the session that will have it.
    restoring: Mapping[SessionId, int] = {}


class Waiting(Struct, frozen=True):
    """A pass that waits for other sessions."""

    since: float
    until: float
    # The time is up.
    over: bool = False


class VerifyState(Struct, frozen=True):
    """State of a stage. Mappings are never changed in place."""

    config: VerifyConfig
    sessions: Mapping[SessionId, StageSession] = {}
    # Closed during their last pass, at whose end they are reported.
    closing: Mapping[SessionId, StageSession] = {}
    # Tokens that stay cached of sessions that are over.
    cached_prompts: Mapping[SessionId, int] = {}
    # With recurrent layers the lengths of each whose states are kept.
    cached_states: Mapping[SessionId, tuple[int, ...]] = {}
    stored_prefixes: StoredPrefixes = StoredPrefixes()
    # By draft node; also of those that are gone, whose segments may still be under way.
    watermarks: Mapping[Rank, Watermarks] = {}
    # By draft node; also of those that are gone, whose ``Open`` may still be under way.
    shares: Mapping[Rank, SlotShare] = {}
    # In the order of arrival.
    queue: tuple[QueuedSegment, ...] = ()
    # Segments as large as those of the last pass that fit in one.
    segments_per_pass: int = 1
    # What passes have taken.
    cost: PassCost = PassCost()
    # Seconds that the link from the stage before takes for a row, as measured and as last reported
    # to the draft nodes, and that of the link onward; 0: not known.
    row_seconds: float = 0.0
    reported_row_seconds: float = 0.0
    onward_row_seconds: float = 0.0
    running: Pass | None = None
    # What the device starts after it, and what that was planned from.
    next_pass: NextPass | None = None
    planned_from: tuple[object, ...] = ()
    # First stage only: the next pass waits for other sessions.
    waiting: Waiting | None = None
    # Computed segments that wait for credit of the next stage; while there are any no pass starts.
    outbox: tuple[QueuedSegment, ...] = ()
    peers: frozenset[Rank] = frozenset()
    # By upstream peer, while its link is up.
    inbound: Mapping[Rank, LinkCredit] = {}
    # Segments that the next stage allows in all on this link, and those sent.
    allowed: int = 0
    sent: int = 0
    # First stage only: the plan in use.
    schedule: BatchSchedule = BatchSchedule()

    @property
    def slot_share(self) -> int:
        """Cache slots for each draft node; 0: no bound."""
        slots = self.config.slots
        return max(1, slots // max(1, len(self.drafts))) if slots else 0

    @property
    def drafts(self) -> tuple[Rank, ...]:
        """The draft nodes that are linked, in order."""
        return tuple(sorted(filter(is_draft, self.peers)))

    def marks(self, draft: Rank) -> Watermarks:
        """The session ids of a draft node."""
        return self.watermarks.get(draft, Watermarks())

    def with_marks(self, draft: Rank, marks: Watermarks) -> VerifyState:
        """The state with other watermarks of a draft node."""
        return replace(self, watermarks={**self.watermarks, draft: marks})

    def with_credit(self, peer: Rank, credit: LinkCredit) -> VerifyState:
        """The state with another count of an inbound link."""
        return replace(self, inbound={**self.inbound, peer: credit})


def check_was_opened(state: VerifyState, session: SessionId, peer: Rank) -> None:
    """Raise ``RemoteProtocolError`` for a message about a session that was never opened."""
    marks = state.marks(owner(session))
    if session > marks.opened and session not in marks.closed_early:
        raise RemoteProtocolError(f"session {session} was never opened", peer=peer)


def fault(peer: Rank, session: SessionId, error: str) -> Send:
    """Tell a session's draft node of its mistake, where a stage has passed it on: the link between
    stages stays up for the others. Raises ``RemoteProtocolError`` where it came from itself."""
    if is_draft(peer):
        raise RemoteProtocolError(error, peer=peer)
    return Send(owner(session), Fault("protocol", error))


def is_prefill(segment: QueuedSegment, session: StageSession) -> bool:
    """True for a prefill chunk, except one of the prompt's last token alone."""
    return segment.ids[0] < session.liveness.prompt_length - 1


def takes_more(session: StageSession, segment: QueuedSegment) -> bool:
    """Whether further segments of the session may share a pass with this one. None joins a prefill
    chunk: it is short so that others wait less, and a first token must not wait for guesses below
    it."""
    return session.opening.coalesce and segment.ids[0] >= session.liveness.prompt_length


def survivors(session: StageSession, ids: Sequence[NodeId]) -> Sequence[int]:
    """Indices of the nodes that are alive, ascending."""
    return session.liveness.living(ids)


def drop_dead_rows(session: StageSession, segment: QueuedSegment) -> QueuedSegment | None:
    """A segment without its dead rows; None where none is left."""
    alive = survivors(session, segment.ids)
    return segment.select(alive) if alive else None


def applied(session: StageSession, segment: QueuedSegment) -> Version:
    """The smallest version applied on a segment's way so far."""
    return min(segment.applied, session.liveness.version)


def prune(session: StageSession, message: PruneIndices) -> tuple[StageSession, Compact | None]:
    """Apply a prune to a session and its cache. An old one changes nothing. Raises
    ``RemoteProtocolError`` where a cached node loses its parent."""
    liveness = session.liveness.apply(message)
    if liveness is session.liveness:
        return session, None
    alive = liveness.holds(session.slots.speculative)
    slots, stay = reclaim(session.slots, liveness.committed, alive)
    if slots is not session.slots and (node := orphan(slots)) is not None:
        name, parent = message.session, slots.speculative[node].parent
        text = f"a prune leaves node {node} of session {name} without its parent {parent}"
        raise RemoteProtocolError(text, peer=owner(name))
    job = None
    if stay is not None:
        job = Compact(message.session, start=session.slots.committed, keep=stay)
    return replace(session, liveness=liveness, slots=slots), job


def plan_part(
    session: StageSession, segment: QueuedSegment, config: VerifyConfig
) -> tuple[StageSession, PassPart]:
    """Give a segment its slots and make it part of a forward pass. The last stage samples for every
    row but prompt nodes before the last, whose successor is known. Raises ``ValueError`` where a
    node's parent is not in the cache."""
    if config.rank == 1:
        segment = replace(segment, pass_number=session.finished_passes + 1)
    liveness, last = session.liveness, config.last
    slots, rows = allocate(session.slots, segment.ids, segment.parents, liveness.committed)
    start = liveness.prompt_length - 1
    sampled = tuple([i for i, row in enumerate(rows) if row.position >= start]) if last else ()
    job = Forward(
        session=segment.session,
        segment=segment.segment,
        committed=session.slots.committed,
        rows=rows,
        tokens=segment.tokens if last or segment.hidden is None else (),
        hidden=segment.hidden,
        sampled_rows=sampled,
        scored_tokens=segment.scored_tokens if last else (),
    )
    return replace(session, slots=slots), PassPart(segment, job)
