"""A token source on a device of its own, as a machine: ``Expand`` in, ``Expanded`` out.

Each request continues the committed path of its session; one that does not is its draft node's
fault. Features of the target are held until the request that they come for, which commits no
further than they reach. Several draft nodes may ask; none can speak of another's sessions, or end
them by its own end. Requests that come while the device is busy are one batch when it is free
(``asyncspec.source.base``).

Messages stand for ``Received`` of them as events, and for ``Send`` of them as effects:

| event | handler | effects |
| --- | --- | --- |
| Features | _features | |
| Expand | _expand | Compute |
| Withdraw | _withdraw | Abandon |
| Close | _release | Compute Abandon SendClosed |
| Floor | _release | Compute Abandon SendClosed |
| Computed | _computed | Expanded |
| LinkUp | _ready | Ready |
| LinkDown | _release | Compute Abandon SendClosed |
| any Computed, Expand, Withdraw, Close and Floor | _dispatch | Compute |
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.jobs import DraftBatch, Feed, Release, TensorRows
from asyncspec.core.machine import (
    Abandon,
    Compute,
    Computed,
    Effect,
    Effects,
    Input,
    LinkDown,
    LinkUp,
    Received,
    Send,
    SendClosed,
)
from asyncspec.source.base import DraftResults, admitted, batched, draft_results
from asyncspec_protocol.errors import LocalProtocolError, RemoteProtocolError
from asyncspec_protocol.ids import Rank, SessionId, check_owner, first_session, is_draft, owner
from asyncspec_protocol.messages import (
    Close,
    Expand,
    Features,
    Floor,
    Message,
    Ready,
    Withdraw,
)


class SourceConfig(Struct, frozen=True):
    """How a source node works."""

    rank: Rank
    # Tokens are below this.
    vocab: int = 2**31
    # Sessions of one draft node at a time; 0: no bound.
    sessions: int = 0
    # Slots there is memory for, in the caches of all sessions; 0: no bound.
    slots: int = 0
    # What it reads of the target beside its tokens, as in ``Open.features``.
    features: tuple[int, ...] = ()


class SourceSession(Struct, frozen=True):
    """A session that drafts here."""

    # Length of its committed path, with what is being read.
    length: int
    # The request that is not answered yet.
    request: Expand | None = None
    # Positions whose features have come, and those of them that came since the last request.
    featured: int = 0
    fed: tuple[TensorRows, ...] = ()


class SourceState(Struct, frozen=True):
    """State of a source node."""

    config: SourceConfig
    sessions: Mapping[SessionId, SourceSession] = {}
    # By draft node: its sessions below this are over.
    floors: Mapping[Rank, SessionId] = {}
    # Requests that wait for the device, in the order in which they came.
    waiting: tuple[Expand, ...] = ()
    # The batch the device works on; empty: it is free.
    working: tuple[Expand, ...] = ()


class SourceMachine:
    """The role ``source``."""

    def __init__(self, config: SourceConfig) -> None:
        self.config = config

    def initial(self) -> SourceState:
        """A source without peers."""
        return SourceState(config=self.config)

    def step(self, state: SourceState, event: Input, now: float) -> tuple[SourceState, Effects]:
        """Handle one input. Raises ``RemoteProtocolError`` for what a peer must not send."""
        match event:
            case Received(peer, Features() as message, handle) if is_draft(peer):
                return _features(state, peer, message, handle), ()
            case Received(peer, message) if is_draft(peer):
                return _dispatch(*_received(state, peer, message))
            case Received(peer, message):
                raise RemoteProtocolError(f"unexpected {type(message).__name__}", peer=peer)
            case Computed(Expand() | DraftBatch() as job, result, seconds):
                return _dispatch(*_computed(state, draft_results(job, result), seconds))
            case LinkDown(peer) if is_draft(peer):
                return _release(state, _of(state, peer))
            case LinkUp(peer) if is_draft(peer) and (self.config.slots or self.config.features):
                return state, (Send(peer, _ready(self.config)),)
            case LinkUp() | LinkDown():
                return state, ()
            case _:
                raise LocalProtocolError(f"a source has no use for {type(event).__name__}")


def _ready(config: SourceConfig) -> Ready:
    return Ready(config.rank, True, config.slots, features=config.features)


def _received(state: SourceState, peer: Rank, message: Message) -> tuple[SourceState, Effects]:
    match message:
        case Expand(session):
            check_owner(session, peer)
            return _expand(state, peer, message)
        case Withdraw(session):
            check_owner(session, peer)
            return _withdraw(state, session)
        case Close(session):
            check_owner(session, peer)
            return _release(state, (session,) if session in state.sessions else ())
        case Floor(first):
            check_owner(first, peer)
            over = tuple(session for session in _of(state, peer) if session < first)
            floors = {**state.floors, peer: max(_floor(state, peer), first)}
            return _release(replace(state, floors=floors), over)
        case _:
            raise RemoteProtocolError(f"unexpected {type(message).__name__}", peer=peer)


def _of(state: SourceState, draft: Rank) -> tuple[SessionId, ...]:
    """The sessions of a draft node."""
    return tuple(session for session in state.sessions if owner(session) == draft)


def _floor(state: SourceState, draft: Rank) -> SessionId:
    return state.floors.get(draft, first_session(draft))


def _known(state: SourceState, peer: Rank, session: SessionId) -> SourceSession:
    """A session, which may be a new one. Raises ``RemoteProtocolError`` for one too many."""
    limit = state.config.sessions
    if limit and session not in state.sessions and len(_of(state, peer)) >= limit:
        # Every session takes a cache here.
        raise RemoteProtocolError(
            f"more than {limit} sessions at a time: give all nodes the same [limits] sessions",
            peer=peer,
        )
    return state.sessions.get(session, SourceSession(0))


def _check_slots(state: SourceState, peer: Rank, session: SessionId, size: int) -> None:
    """Raises ``RemoteProtocolError`` where there is no memory for ``size`` positions of a session
    beside those of its draft node's others."""
    others = (state.sessions[other] for other in _of(state, peer) if other != session)
    total = size + sum(max(other.length, other.featured) for other in others)
    if state.config.slots and total > state.config.slots:
        error = f"the caches have {state.config.slots} slots, and {total} are asked for"
        raise RemoteProtocolError(error, peer=peer)


def _features(state: SourceState, peer: Rank, message: Features, handle: object) -> SourceState:
    """Hold features until the request that they come for."""
    session, start, count = message.session, message.start, message.count
    check_owner(session, peer)
    if session < _floor(state, peer):
        return state
    current = _known(state, peer, session)
    wanted = state.config.features and count and handle is not None
    if not wanted or start != current.featured:
        error = f"features of session {session} from position {start} on, not {current.featured}"
        raise RemoteProtocolError(error, peer=peer)
    _check_slots(state, peer, session, start + count)
    fed = (*current.fed, TensorRows(handle, tuple(range(count))))
    current = replace(current, featured=start + count, fed=fed)
    return replace(state, sessions={**state.sessions, session: current})


def _expand(state: SourceState, peer: Rank, job: Expand) -> tuple[SourceState, Effects]:
    if job.session < _floor(state, peer):
        return state, ()  # over, by the draft node's ``Floor``
    current = _known(state, peer, job.session)
    if current.request is not None or job.base != current.length:
        raise RemoteProtocolError(
            f"session {job.session} goes on from token {job.base}, not {current.length}", peer=peer
        )
    length = job.base + len(job.committed)
    if state.config.features and length > current.featured + 1:
        error = f"session {job.session} has features of {current.featured} tokens, not {length - 1}"
        raise RemoteProtocolError(error, peer=peer)
    _check_slots(state, peer, job.session, length)
    if max((*job.committed, *job.tokens), default=0) >= state.config.vocab:
        raise RemoteProtocolError("a token that is not in the vocabulary", peer=peer)
    effects: Effects = ()
    if current.fed:
        start = current.featured - sum(len(rows.rows) for rows in current.fed)
        effects = (Compute(Feed(job.session, start, current.fed)),)
    current = replace(current, length=length, request=job, fed=())
    sessions = {**state.sessions, job.session: current}
    return replace(state, sessions=sessions, waiting=(*state.waiting, job)), effects


def _withdraw(state: SourceState, session: SessionId) -> tuple[SourceState, Effects]:
    """What a session's request grows is of no use any more; it is answered all the same."""
    current = state.sessions.get(session)
    request = None if current is None else current.request
    if current is None or request is None:
        return state, ()
    if request in state.working:
        return state, (Abandon(request),)
    # The device only reads the tokens that the request brings.
    short = replace(request, depth=0, count=0)
    waiting = tuple(short if job is request else job for job in state.waiting)
    sessions = {**state.sessions, session: replace(current, request=short)}
    return replace(state, sessions=sessions, waiting=waiting), ()


def _dispatch(state: SourceState, effects: Effects) -> tuple[SourceState, Effects]:
    """Give a free device what waits."""
    if state.working or not state.waiting:
        return state, effects
    batch = admitted(state.waiting)
    state = replace(state, working=batch, waiting=state.waiting[len(batch) :])
    return state, (*effects, Compute(batched(batch)))


def _computed(
    state: SourceState, batch: DraftResults, seconds: float
) -> tuple[SourceState, Effects]:
    """The device is free again. A batch's time counts in equal parts."""
    effects: list[Effect] = []
    sessions = dict(state.sessions)
    for job, answer in batch:
        current = sessions.get(job.session)
        if current is not None and current.request is job:  # else closed meanwhile
            sessions[job.session] = replace(current, request=None)
            effects.append(Send(owner(job.session), replace(answer, seconds=seconds / len(batch))))
    return replace(state, sessions=sessions, working=()), tuple(effects)


def _release(state: SourceState, over: tuple[SessionId, ...]) -> tuple[SourceState, Effects]:
    effects: list[Effect] = []
    for session in over:
        request = state.sessions[session].request
        if request is not None and request in state.working:
            effects.append(Abandon(request))
        effects.append(Compute(Release(session)))
        effects.append(SendClosed(owner(session), session, 0, 0, 0, 0.0))
    left = {k: v for k, v in state.sessions.items() if k not in over}
    waiting = tuple(job for job in state.waiting if job.session not in over)
    return replace(state, sessions=left, waiting=waiting), tuple(effects)
