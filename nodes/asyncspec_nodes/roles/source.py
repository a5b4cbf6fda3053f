"""A token source on a device of its own, as a machine: ``Expand`` in, ``Expanded`` out.

Law of this file: a draft node says what the path of its session is, and every question continues
the one before it; whatever does not is that draft node's fault. Several draft nodes may ask; none
can speak of another's sessions, or end them by its own end. What comes while the device is busy
waits, whoever asks, and is one batch when it is free (``asyncspec.source.batch``). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.jobs import DraftBatch, Release
from asyncspec.core.machine import (
    Abandon,
    Cancelled,
    Compute,
    Computed,
    Effect,
    Input,
    LinkDown,
    LinkUp,
    Received,
    Send,
    SendClosed,
    Stopped,
    Submitted,
    TaskDone,
    TimerFired,
)
from asyncspec.source.batch import Answers, admitted, answers, batched
from asyncspec_nodes.roles.ownership import check_owner
from asyncspec_protocol.errors import LocalProtocolError, RemoteProtocolError
from asyncspec_protocol.ids import Rank, SessionId, first_session, is_draft, owner
from asyncspec_protocol.messages import Close, Expand, Floor, Message, Ready, Withdraw

Effects = tuple[Effect, ...]


class SourceConfig(Struct, frozen=True):
    """Where it stands."""

    rank: Rank
    # Tokens are below this.
    vocab: int = 2**31
    # Sessions of one draft node at a time; 0: no bound.
    sessions: int = 0
    # Slots there is memory for, in the caches of all sessions; 0: no bound.
    slots: int = 0


class Reading(Struct, frozen=True):
    """A session as this node knows it."""

    # Length of its path, what is being read included.
    length: int
    # The question that is not answered yet.
    asked: Expand | None = None


class SourceState(Struct, frozen=True):
    """Everything a source node knows."""

    config: SourceConfig
    sessions: Mapping[SessionId, Reading] = {}
    # By draft node: its sessions below this are over.
    floors: Mapping[Rank, SessionId] = {}
    # Questions the device does not know yet, in the order in which they came.
    waiting: tuple[Expand, ...] = ()
    # The batch it works on; empty: it is free.
    working: tuple[Expand, ...] = ()


class SourceMachine:
    """The role ``source``."""

    def __init__(self, config: SourceConfig) -> None:
        self.config = config

    def initial(self) -> SourceState:
        """A source that has met nobody yet."""
        return SourceState(config=self.config)

    def step(self, state: SourceState, event: Input, now: float) -> tuple[SourceState, Effects]:
        """React to one input. Raises ``RemoteProtocolError`` for what a peer must not say."""
        match event:
            case Received(peer, message) if is_draft(peer):
                return _go_on(*_received(state, peer, message))
            case Received(peer, message):
                raise RemoteProtocolError(f"unexpected {type(message).__name__}", peer=peer)
            case Computed(Expand() | DraftBatch() as job, result, seconds):
                return _go_on(*_computed(state, answers(job, result), seconds))
            case LinkDown(peer) if is_draft(peer):
                return _forget(state, _of(state, peer))
            case LinkUp(peer) if is_draft(peer) and self.config.slots:
                return state, (Send(peer, Ready(self.config.rank, True, self.config.slots)),)
            case LinkUp() | LinkDown():
                return state, ()
            case Computed() | TimerFired() | Submitted() | Cancelled() | Stopped() | TaskDone():
                raise LocalProtocolError(f"a source has no use for {type(event).__name__}")
            case _:
                assert_never(event)


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
            return _forget(state, (session,) if session in state.sessions else ())
        case Floor(first):
            check_owner(first, peer)
            over = tuple(session for session in _of(state, peer) if session < first)
            floors = {**state.floors, peer: max(_floor(state, peer), first)}
            return _forget(replace(state, floors=floors), over)
        case _:
            raise RemoteProtocolError(f"unexpected {type(message).__name__}", peer=peer)


def _of(state: SourceState, draft: Rank) -> tuple[SessionId, ...]:
    """The sessions of a draft node."""
    return tuple(session for session in state.sessions if owner(session) == draft)


def _floor(state: SourceState, draft: Rank) -> SessionId:
    return state.floors.get(draft, first_session(draft))


def _expand(state: SourceState, peer: Rank, job: Expand) -> tuple[SourceState, Effects]:
    if job.session < _floor(state, peer):
        return state, ()  # over, and the draft node has said so
    most = state.config.sessions
    if most and job.session not in state.sessions and len(_of(state, peer)) >= most:
        # Every session takes a cache here.
        raise RemoteProtocolError(
            f"more than {most} sessions at a time: give all nodes the same [limits] sessions",
            peer=peer,
        )
    reading = state.sessions.get(job.session, Reading(0))
    if reading.asked is not None or job.base != reading.length:
        raise RemoteProtocolError(
            f"session {job.session} goes on from token {job.base}, not {reading.length}", peer=peer
        )
    if max((*job.committed, *job.tokens), default=0) >= state.config.vocab:
        raise RemoteProtocolError("a token that is not in the vocabulary", peer=peer)
    reading = Reading(job.base + len(job.committed), job)
    sessions = {**state.sessions, job.session: reading}
    return replace(state, sessions=sessions, waiting=(*state.waiting, job)), ()


def _withdraw(state: SourceState, session: SessionId) -> tuple[SourceState, Effects]:
    """Nothing more needs to grow for a session's question; it is answered all the same."""
    reading = state.sessions.get(session)
    asked = None if reading is None else reading.asked
    if reading is None or asked is None:
        return state, ()
    if asked in state.working:
        return state, (Abandon(asked),)
    # The device will only read what the question has brought.
    short = replace(asked, depth=0, count=0)
    waiting = tuple(short if job is asked else job for job in state.waiting)
    sessions = {**state.sessions, session: replace(reading, asked=short)}
    return replace(state, sessions=sessions, waiting=waiting), ()


def _go_on(state: SourceState, effects: Effects) -> tuple[SourceState, Effects]:
    """A device that is free gets what waits."""
    if state.working or not state.waiting:
        return state, effects
    batch = admitted(state.waiting)
    state = replace(state, working=batch, waiting=state.waiting[len(batch) :])
    return state, (*effects, Compute(batched(batch)))


def _computed(state: SourceState, batch: Answers, seconds: float) -> tuple[SourceState, Effects]:
    """The device is free again. Its time was spent for all alike."""
    effects: list[Effect] = []
    sessions = dict(state.sessions)
    for job, answer in batch:
        reading = sessions.get(job.session)
        if reading is not None and reading.asked is job:  # else closed meanwhile
            sessions[job.session] = replace(reading, asked=None)
            effects.append(Send(owner(job.session), replace(answer, seconds=seconds / len(batch))))
    return replace(state, sessions=sessions, working=()), tuple(effects)


def _forget(state: SourceState, over: tuple[SessionId, ...]) -> tuple[SourceState, Effects]:
    effects: list[Effect] = []
    for session in over:
        asked = state.sessions[session].asked
        if asked is not None and asked in state.working:
            effects.append(Abandon(asked))
        effects.append(Compute(Release(session)))
        effects.append(SendClosed(owner(session), session, 0, 0, 0, 0.0))
    left = {k: v for k, v in state.sessions.items() if k not in over}
    waiting = tuple(job for job in state.waiting if job.session not in over)
    return replace(state, sessions=left, waiting=waiting), tuple(effects)
