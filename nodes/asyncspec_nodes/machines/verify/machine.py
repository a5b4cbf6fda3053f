"""The verify stage as a machine: segments in, forward passes, segments or verdicts out.

Law of this file: structure is decided on the draft node alone. A stage knows parents and what is
alive, applies a prune the moment it comes (waiting segments lose their dead rows, rows that die
during a pass are dropped before they are sent on), and never waits for anybody but the next
stage's credit. Pure: no clock, no sockets, no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.actor.machine import (
    Abandon,
    Cancelled,
    Compute,
    Computed,
    Effect,
    Fired,
    Input,
    Joined,
    Lost,
    Received,
    Report,
    Send,
    Stopped,
    Submitted,
)
from asyncspec.jobs import Admit, Forward, Judged, Release, Rows
from asyncspec.liveness import Liveness
from asyncspec.sampling import Sampling
from asyncspec_nodes.machines.verify.session import (
    Running,
    StageSession,
    Waiting,
    applied,
    count,
    plan,
    prune,
    survivors,
    taps,
    thin,
)
from asyncspec_protocol.errors import LocalProtocolError, RemoteProtocolError
from asyncspec_protocol.ids import DRAFT, Rank, SessionId
from asyncspec_protocol.messages import (
    Close,
    Credit,
    Floor,
    Message,
    Open,
    PruneIndices,
    Ready,
    Segment,
    Verdict,
)

Effects = tuple[Effect, ...]

# A bound on what a confused draft node can make a stage remember.
MOST_CLOSED_EARLY = 4096


class VerifyConfig(Struct, frozen=True):
    """Where a stage stands."""

    rank: Rank
    stages: int
    # Segments that may wait here, the one in service not counted. More hides latency of the link,
    # fewer leave the choice of what to send to a later moment.
    window: int = 2
    # Tokens are below this; the device has no embedding for others.
    vocab: int = 2**31
    # The layers here, of so many in all: they say which features are known where.
    first_layer: int = 0
    end_layer: int = 2**31
    layers: int = 2**31

    @property
    def last(self) -> bool:
        """True for the stage with the head."""
        return self.rank == self.stages

    @property
    def before(self) -> Rank:
        """Where segments come from."""
        return Rank(self.rank - 1)

    @property
    def after(self) -> Rank:
        """Where segments go; meaningless on the last stage."""
        return Rank(self.rank + 1)


class VerifyState(Struct, frozen=True):
    """Everything a stage knows. Mappings are never changed in place."""

    config: VerifyConfig
    sessions: Mapping[SessionId, StageSession] = {}
    # Closed while their last pass was still in service: the report waits for its end.
    closing: Mapping[SessionId, StageSession] = {}
    # Highest session id ever opened; what is below and not open is over, and dropped.
    opened: SessionId = SessionId(-1)
    # Closed before their ``Open`` had come down the pipeline.
    closed_early: frozenset[SessionId] = frozenset()
    queue: tuple[Waiting, ...] = ()
    running: Running | None = None
    # Computed, but the next stage has no credit for them yet. While one waits nothing is started.
    parked: tuple[Waiting, ...] = ()
    peers: frozenset[Rank] = frozenset()
    # Segments the stage before may have sent in all, and those that came, on this link.
    granted: int = 0
    received: int = 0
    # The same towards the stage after.
    allowed: int = 0
    sent: int = 0


class VerifyMachine:
    """The role ``verify``."""

    def __init__(self, config: VerifyConfig) -> None:
        self.config = config

    def initial(self) -> VerifyState:
        """A stage that has met nobody yet."""
        return VerifyState(config=self.config)

    def step(self, state: VerifyState, event: Input, now: float) -> tuple[VerifyState, Effects]:
        """React to one input. Raises ``RemoteProtocolError`` for what a peer must not say."""
        match event:
            case Received(peer, message, tensor):
                state, effects = _received(state, peer, message, tensor)
            case Computed(job, result, seconds):
                if not isinstance(job, Forward):
                    raise LocalProtocolError("a stage asks for no other result than a pass's")
                state, effects = _computed(state, job, result, seconds)
            case Joined(peer):
                state, effects = _joined(state, peer)
            case Lost(peer):
                state, effects = _lost(state, peer)
            case Fired() | Submitted() | Cancelled() | Stopped():
                raise LocalProtocolError(f"a stage has no use for {type(event).__name__}")
            case _:
                assert_never(event)
        state, more = _serve(state)
        return state, (*effects, *more)


# --- messages -----------------------------------------------------------------------------------


def _received(
    state: VerifyState, peer: Rank, message: Message, tensor: object | None
) -> tuple[VerifyState, Effects]:
    config = state.config
    match message:
        case Segment() if peer == config.before:
            return _segment(state, message, tensor)
        case Open() if peer == config.before:
            return _open(state, message)
        case PruneIndices() if peer == DRAFT:
            return _prune(state, message)
        case Close() if peer == DRAFT:
            return _close(state, message.session)
        case Floor(first) if peer == DRAFT:
            return _floor(state, first)
        case Credit(limit) if peer == config.after and not config.last:
            if limit < state.allowed:
                raise RemoteProtocolError("credit was taken back", peer=peer)
            return replace(state, allowed=limit), ()
        case _:
            raise RemoteProtocolError(f"unexpected {type(message).__name__}", peer=peer)


def _segment(
    state: VerifyState, message: Segment, tensor: object | None
) -> tuple[VerifyState, Effects]:
    peer = state.config.before
    if state.received >= state.granted:
        raise RemoteProtocolError("segment without credit", peer=peer)
    state = replace(state, received=state.received + 1)
    session, first = state.sessions.get(message.session), peer == DRAFT
    if (tensor is None) != first or not _has_tokens(session, message, first) or not message.ids:
        raise RemoteProtocolError("segment without its rows' input", peer=peer)
    if max(message.tokens, default=0) >= state.config.vocab:
        raise RemoteProtocolError("segment with a token that is not in the vocabulary", peer=peer)
    if session is None:
        _known(state, message.session, peer)
        return _grant(state)
    if message.taps != taps(session, state.config.first_layer):
        raise RemoteProtocolError(f"segment with {message.taps} taps a row", peer=peer)
    waiting = thin(
        session,
        Waiting(
            session=message.session,
            segment=message.segment,
            applied=message.applied,
            ids=message.ids,
            parents=message.parents,
            tokens=message.tokens,
            hidden=None if first else Rows(tensor, tuple(range(len(message.ids)))),
        ),
    )
    if waiting is None:
        return _grant(state)
    _check_parents(state, session, waiting)
    return replace(state, queue=(*state.queue, waiting)), ()


def _has_tokens(session: StageSession | None, message: Segment, first: bool) -> bool:
    """Whether the tokens are there if, and only if, they are needed. Of a session that is over
    nobody knows any more."""
    needed = first or (session is not None and session.tokens_travel)
    return bool(message.tokens) == needed or (session is None and not first)


def _check_parents(state: VerifyState, session: StageSession, waiting: Waiting) -> None:
    """A node follows its parent on every link, so a live node's parent is here, and it is not."""
    seats, here = session.slots.seats, {session.slots.tip}
    for before in state.queue:
        if before.session == session.session:
            here.update(before.ids)
    for node, parent in zip(waiting.ids, waiting.parents, strict=True):
        if node in here or node in seats or not (parent in here or parent in seats):
            raise RemoteProtocolError(
                f"node {node} of session {session.session} does not follow its parent {parent}",
                peer=state.config.before,
            )
        here.add(node)


def _open(state: VerifyState, message: Open) -> tuple[VerifyState, Effects]:
    config, session = state.config, message.session
    if session <= state.opened and session not in state.closed_early:
        return state, ()  # over before it came down the pipeline
    state = replace(state, opened=max(state.opened, session))
    if not config.last and config.after not in state.peers:
        # The next stage will never hear of it; that the link is down is on its way to the draft
        # node, which opens another session when the pipeline stands again.
        return replace(state, closed_early=state.closed_early - {session}), ()
    onward: Effects = () if config.last else (Send(config.after, message),)
    if max(message.features, default=0) > config.layers:
        raise RemoteProtocolError(
            f"features of depth {max(message.features)} of {config.layers} layers",
            peer=config.before,
        )
    sampling = Sampling.of(message)
    new = StageSession(
        session=session,
        liveness=Liveness(prompt_length=message.prompt_length),
        features=message.features,
        tokens_travel=sampling.penalises,
    )
    if session in state.closed_early:
        state = replace(state, closed_early=state.closed_early - {session})
        return state, (*onward, _report(new))
    asked = message.prompt_length - message.given
    admit = Compute(Admit(session, message.capacity, sampling, asked, message.features))
    return replace(state, sessions={**state.sessions, session: new}), (admit, *onward)


def _prune(state: VerifyState, message: PruneIndices) -> tuple[VerifyState, Effects]:
    session = state.sessions.get(message.session)
    if session is None:
        _known(state, message.session, DRAFT)
        return state, ()
    session, job = prune(session, message)
    state = replace(state, sessions={**state.sessions, message.session: session})
    effects: Effects = () if job is None else (Compute(job),)
    state, abandoned = _abandon(state)
    state, granted = _thin_queue(state)
    return state, (*abandoned, *effects, *granted)


def _abandon(state: VerifyState) -> tuple[VerifyState, Effects]:
    """A pass all of whose rows are dead only keeps the device from what is alive."""
    running = state.running
    if running is None or running.abandoned:
        return state, ()
    session = state.sessions.get(running.waiting.session)
    if session is not None and survivors(session, running.waiting.ids):
        return state, ()
    return replace(state, running=replace(running, abandoned=True)), (Abandon(running.job),)


def _thin_queue(state: VerifyState) -> tuple[VerifyState, Effects]:
    """Dead rows leave the queue and what is parked; an emptied segment gives its place back."""
    queue = _thinned(state, state.queue)
    freed = len(state.queue) - len(queue)
    parked = _thinned(state, state.parked)
    return _grant(replace(state, queue=queue, parked=parked), freed)


def _thinned(state: VerifyState, segments: tuple[Waiting, ...]) -> tuple[Waiting, ...]:
    alive = (thin(state.sessions[w.session], w) for w in segments if w.session in state.sessions)
    return tuple(w for w in alive if w is not None)


def _known(state: VerifyState, session: SessionId, peer: Rank) -> None:
    """A session that is over may still be spoken of; one that never was may not."""
    if session > state.opened and session not in state.closed_early:
        raise RemoteProtocolError(f"session {session} was never opened", peer=peer)


# --- the end of a session -----------------------------------------------------------------------


def _close(state: VerifyState, session_id: SessionId) -> tuple[VerifyState, Effects]:
    session = state.sessions.get(session_id)
    if session is None:
        if session_id > state.opened:
            if len(state.closed_early) >= MOST_CLOSED_EARLY:
                raise RemoteProtocolError("too many sessions closed unopened", peer=DRAFT)
            state = replace(state, closed_early=state.closed_early | {session_id})
        return state, ()
    sessions = {k: v for k, v in state.sessions.items() if k != session_id}
    state = replace(state, sessions=sessions)
    release: Effects = (Compute(Release(session_id)),)
    running = state.running
    if running is not None and running.waiting.session == session_id:
        state = replace(state, closing={**state.closing, session_id: session})
    else:
        release = (*release, _report(session))
    state, abandoned = _abandon(state)
    state, granted = _thin_queue(state)
    return state, (*abandoned, *release, *granted)


def _floor(state: VerifyState, first: SessionId) -> tuple[VerifyState, Effects]:
    """Forget every session below ``first``: they ended while the draft node could not say so."""
    over = tuple(session for session in state.sessions if session < first)
    state = replace(
        state,
        opened=max(state.opened, SessionId(first - 1)),
        closed_early=frozenset(s for s in state.closed_early if s >= first),
        sessions={k: v for k, v in state.sessions.items() if k >= first},
    )
    state, abandoned = _abandon(state)
    state, granted = _thin_queue(state)
    return state, (*abandoned, *(Compute(Release(session)) for session in over), *granted)


def _report(session: StageSession) -> Report:
    return Report(
        to=DRAFT,
        session=session.session,
        passes=session.passes,
        rows=session.rows,
        dead_rows=session.dead_rows,
        compute_seconds=session.compute_seconds,
    )


# --- compute ------------------------------------------------------------------------------------


def _serve(state: VerifyState) -> tuple[VerifyState, Effects]:
    """Send what is parked and start the next pass, where that is possible now."""
    effects: list[Effect] = []
    while state.parked and state.sent < state.allowed:
        head = state.parked[0]
        state = replace(state, parked=state.parked[1:], sent=state.sent + 1)
        effects.append(_onward(state, state.sessions[head.session], head))
    if state.running is None and not state.parked and state.queue:
        waiting = state.queue[0]
        session, running, job = plan(
            state.sessions[waiting.session], waiting, last=state.config.last
        )
        state = replace(
            state,
            queue=state.queue[1:],
            running=running,
            sessions={**state.sessions, waiting.session: session},
        )
        effects.append(Compute(job))
        state, granted = _grant(state)
        effects.extend(granted)
    return state, tuple(effects)


def _computed(
    state: VerifyState, job: Forward, result: object, seconds: float
) -> tuple[VerifyState, Effects]:
    running = state.running
    if running is None or (running.waiting.session, running.waiting.segment) != (
        job.session,
        job.segment,
    ):
        raise LocalProtocolError(f"no pass of segment {job.segment} is in service")
    state = replace(state, running=None)
    waiting = running.waiting
    session = state.closing.get(waiting.session) or state.sessions.get(waiting.session)
    if session is None:
        return state, ()  # dropped with a lost peer
    rows = len(waiting.ids)
    stay = survivors(session, waiting.ids)
    session = count(session, rows, len(stay), seconds)
    if waiting.session in state.closing:
        left = {k: v for k, v in state.closing.items() if k != waiting.session}
        return replace(state, closing=left), (_report(session),)
    state = replace(state, sessions={**state.sessions, session.session: session})
    if state.config.last:
        return state, _verdict(session, running, result, stay)
    if not stay:
        return state, ()
    tokens = waiting.tokens if session.tokens_travel else ()
    hidden = Rows(result, tuple(range(rows)))
    done = replace(waiting, tokens=tokens, hidden=hidden).select(stay)
    return replace(state, parked=(*state.parked, done)), ()


def _verdict(
    session: StageSession, running: Running, result: object, stay: Sequence[int]
) -> Effects:
    """The verdict of a pass, for the rows that are still alive, with their features if wanted."""
    if running.abandoned:
        return ()
    tokens = result.tokens if isinstance(result, Judged) else result
    if not isinstance(tokens, tuple) or len(tokens) != len(running.judged):
        raise LocalProtocolError("the device judged other rows than it was asked to")
    if isinstance(result, Judged) != bool(session.features):
        raise LocalProtocolError("the device gave features to a session that wants none, or none")
    ids = running.waiting.ids
    alive = set(stay)
    pairs = [
        (ids[row], token) for row, token in zip(running.judged, tokens, strict=True) if row in alive
    ]
    features = Rows(result.features, tuple(stay)) if isinstance(result, Judged) and stay else None
    if not pairs and features is None:
        return ()
    message = Verdict(
        session=session.session,
        segment=running.waiting.segment,
        applied=applied(session, running.waiting),
        ids=tuple(node for node, _ in pairs),
        tokens=tuple(token for _, token in pairs),
        featured=tuple(ids[row] for row in stay) if features is not None else (),
    )
    return (Send(DRAFT, message, features),)


def _onward(state: VerifyState, session: StageSession, waiting: Waiting) -> Send:
    message = Segment(
        session=waiting.session,
        segment=waiting.segment,
        applied=applied(session, waiting),
        ids=waiting.ids,
        parents=waiting.parents,
        tokens=waiting.tokens,
        taps=taps(session, state.config.end_layer),
    )
    return Send(state.config.after, message, waiting.hidden)


# --- peers --------------------------------------------------------------------------------------


def _grant(state: VerifyState, places: int = 1) -> tuple[VerifyState, Effects]:
    """Give the stage before its credit back for segments that have left the queue."""
    if not places or state.config.before not in state.peers:
        return state, ()
    state = replace(state, granted=state.granted + places)
    return state, (Send(state.config.before, Credit(limit=state.granted)),)


def _joined(state: VerifyState, peer: Rank) -> tuple[VerifyState, Effects]:
    config = state.config
    state = replace(state, peers=state.peers | {peer})
    effects: list[Effect] = []
    if peer == config.before:
        state = replace(state, granted=config.window, received=0)
        effects.append(Send(peer, Credit(limit=config.window)))
    if peer == config.after and not config.last:
        state = replace(state, allowed=0, sent=0)
    if peer in (DRAFT, config.after) and DRAFT in state.peers:
        effects.append(Send(DRAFT, _ready(state)))
    return state, tuple(effects)


def _ready(state: VerifyState) -> Ready:
    up = state.config.last or state.config.after in state.peers
    return Ready(rank=state.config.rank, up=up)


def _lost(state: VerifyState, peer: Rank) -> tuple[VerifyState, Effects]:
    """Without a neighbour or the draft node no session can go on; the draft node, which has the
    committed path, opens new ones when the pipeline stands again."""
    if peer not in state.peers:
        return state, ()
    config = state.config
    released = tuple(Compute(Release(session)) for session in state.sessions)
    freed = len(state.queue)
    state = replace(state, peers=state.peers - {peer}, sessions={}, closing={}, queue=(), parked=())
    state, abandoned = _abandon(state)
    state, granted = _grant(state, freed)
    down: Effects = ()
    if peer == config.after and not config.last and DRAFT in state.peers:
        down = (Send(DRAFT, _ready(state)),)
    return state, (*abandoned, *released, *granted, *down)
