"""Requests as their users make, cancel and end them, and those that wait too long."""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from asyncspec.core.jobs import DraftBatch
from asyncspec.core.machine import (
    Cancelled,
    Computed,
    Effect,
    Input,
    LinkDown,
    LinkUp,
    Received,
    Request,
    Send,
    SetTimer,
    Stopped,
    Submitted,
    TaskDone,
    TimerFired,
)
from asyncspec.source.batch import Answers, answers
from asyncspec_nodes.roles.draft import lifecycle, planning, speculation
from asyncspec_nodes.roles.draft.lifecycle import (
    account,
    account_timer,
    close,
    end,
    finish_if_complete,
    freed_below,
    leave_prompts,
    unserved,
)
from asyncspec_nodes.roles.draft.scheduler import go_on
from asyncspec_nodes.roles.draft.session import keep
from asyncspec_nodes.roles.draft.state import (
    FIRST,
    REJOIN,
    DraftConfig,
    DraftState,
    Effects,
    Job,
    put,
)
from asyncspec_nodes.roles.draft.stats import Counters
from asyncspec_protocol.errors import LocalProtocolError, RemoteProtocolError
from asyncspec_protocol.ids import Rank, SessionId, owner
from asyncspec_protocol.messages import (
    Closed,
    Credit,
    Expand,
    Expanded,
    Floor,
    PassTimes,
    Ready,
    Schedule,
    Verdict,
)
from asyncspec_protocol.requests import BREAKS


def submitted(state: DraftState, request: Request, now: float) -> tuple[DraftState, Effects]:
    """A request waits for a session. Raises ``LocalProtocolError`` for an impossible one."""
    fine = request.prompt and request.max_new_tokens > 0
    if not fine or request.policy not in state.config.policies:
        raise LocalProtocolError(f"request {request.request} is not one a user may make")
    job = Job(request=request, counters=Counters(started=now))
    state = replace(state, backlog=(*state.backlog, job))
    if state.up or len(state.backlog) > 1:
        return state, ()
    return state, (SetTimer(REJOIN, now + state.config.rejoin_seconds),)


def cancelled(state: DraftState, request_id: int, now: float) -> tuple[DraftState, Effects]:
    """Nobody wants the answer any more."""
    for job in state.backlog:
        if job.request.request == request_id:
            left = tuple(j for j in state.backlog if j is not job)
            finish = unserved(job, "cancelled", "", now)
            return replace(state, backlog=left), (finish,)
    for session in state.sessions.values():
        if session.request.request == request_id:
            return end(state, session, "cancelled", now)
    return state, ()


def stopped(
    state: DraftState, request_id: int, kept: int, now: float
) -> tuple[DraftState, Effects]:
    """An answer ends with its ``kept``-th token. Meanwhile it may have got more of them, may have
    reached another end, or may wait for the pipeline to come back."""
    for job in state.backlog:
        if job.request.request == request_id:
            _check_kept(kept, job.given)
            left = tuple(j for j in state.backlog if j is not job)
            finish = unserved(replace(job, given=job.given[:kept]), "stop", "", now)
            return replace(state, backlog=left), (finish,)
    for session in state.sessions.values():
        if session.request.request == request_id:
            _check_kept(kept, session.given)
            return end(state, keep(session, kept), "stop", now)
    for key, ending in state.endings.items():
        if ending.session.request.request == request_id:
            _check_kept(kept, ending.session.given)
            session = keep(ending.session, kept)
            ended = replace(ending, session=session, reason="stop")
            return replace(state, endings={**state.endings, key: ended}), ()
    return state, ()


def _check_kept(kept: int, given: tuple[int, ...]) -> None:
    if not 0 < kept <= len(given):
        raise LocalProtocolError(f"an answer of {len(given)} tokens cannot end with token {kept}")


def fired(state: DraftState, timer: str, now: float) -> tuple[DraftState, Effects]:
    """Requests that wait too long fail; one that has ended waits for no account any more."""
    if timer == REJOIN:
        if state.up:
            return state, ()
        detail = "the pipeline is not complete: " + who_is_missing(state)
        failed = tuple(unserved(job, "error", detail, now) for job in state.backlog)
        return replace(state, backlog=()), failed
    for key in state.endings:
        if timer == account_timer(key):
            return finish_if_complete(state, key, force=True)
    return state, ()


def who_is_missing(state: DraftState) -> str:
    ranks = range(1, state.config.stages + 1)
    gone = [f"stage {r} is not connected" for r in ranks if r not in state.peers]
    cut = [
        f"stage {r} has no link to stage {r + 1}"
        for r in ranks
        if r in state.peers and r not in state.ready
    ]
    source = state.config.source
    if source is not None and source not in state.peers:
        gone.append("the token source is not connected")
    return ", ".join(gone or cut) or "a stage came back too late"


# --- Stages that come and go. A lost one ends sessions, never requests.

LEFT = 2**32
"""Sessions that a draft node is to have left, whatever a stage says it has heard of: more than it
ever opens."""


def joined(state: DraftState, peer: Rank) -> tuple[DraftState, Effects]:
    """A node can be reached; the first stage's credit starts anew."""
    state = replace(state, peers=state.peers | {peer})
    if peer == FIRST:
        state = replace(state, allowed=0, sent=0, window=0)
    # A stage says when it is ready; a source is as soon as it is there.
    return complete(state) if peer == state.config.source else (state, ())


def heard(state: DraftState, message: Ready) -> DraftState:
    """A node has said how it is: its slots, and what of earlier sessions is over there. Raises
    ``RemoteProtocolError`` where it has heard of sessions that cannot be this node's."""
    rank, floor = message.rank, message.floor
    echoes = state.echoes
    if rank in echoes and (not message.up or floor >= echoes[rank]):
        echoes = {other: since for other, since in echoes.items() if other != rank}
    state = replace(state, slots={**state.slots, rank: message.slots}, echoes=echoes)
    if floor >= 0 and rank <= state.config.stages:
        state = freed_below(replace(state, telling=state.telling | {rank}), rank, floor)
    return _above(state, message.opened, rank)


def _above(state: DraftState, opened: SessionId, peer: Rank) -> DraftState:
    """The next session is above those of this node that a stage has heard of: they were issued
    before it was started again, by a clock that has been set back since. Raises
    ``RemoteProtocolError`` where they cannot be this node's."""
    if opened < state.next_session:
        return state
    first = SessionId(opened + 1)
    if owner(SessionId(first + LEFT)) != owner(state.config.first_session):
        raise RemoteProtocolError(f"session {opened} is not this draft node's", peer=peer)
    return replace(state, next_session=first)


def complete(state: DraftState) -> tuple[DraftState, Effects]:
    """If the pipeline stands now: what earlier sessions left behind somewhere is void."""
    if not state.up or state.sessions:
        return state, ()
    floor = Floor(first=state.next_session)
    floors = tuple(Send(rank, floor) for rank in sorted(state.peers))
    return state, (*floors, SetTimer(REJOIN, None))


def lost(state: DraftState, peer: Rank, now: float) -> tuple[DraftState, Effects]:
    """A stage is gone, and with it its accounts and every session."""
    if peer not in state.peers:
        return state, ()
    stood, peers = state.up, state.peers - {peer}
    echoes = {rank: since for rank, since in state.echoes.items() if rank != peer}
    if (before := Rank(peer - 1)) in state.ready:
        echoes[before] = state.next_session
    state = replace(
        state,
        peers=peers,
        ready=state.ready - {peer},
        echoes=echoes,
        expected=0,
    )
    state, down = broken(state, now, stood=stood)
    effects = list(down)
    for key, ending in state.endings.items():
        left = replace(ending, missing=ending.missing - {peer})
        state = replace(state, endings={**state.endings, key: left})
        state, finished = finish_if_complete(state, key)
        effects.extend(finished)
    return state, tuple(effects)


def broken(
    state: DraftState, now: float, *, stood: bool, echo: bool = False
) -> tuple[DraftState, Effects]:
    """The pipeline is broken: sessions end, their requests go back to the head of the backlog, but
    for one that breaks it whenever it is read. If it ``stood`` until now they wait for it from now
    on. ``echo``: of that break it has heard before."""
    effects: list[Effect] = []
    back, ended = lifecycle.back(state, echo=echo)
    for session in state.sessions.values():
        state, closed = close(state, session)
        effects.extend(closed)
    for job in ended:
        effects += (unserved(job, "error", lifecycle.why_ended(job), now, BREAKS),)
    state = replace(state, backlog=(*back, *state.backlog))
    state = leave_prompts(state, state.kept)
    if state.backlog and stood:
        effects.append(SetTimer(REJOIN, now + state.config.rejoin_seconds))
    return state, tuple(effects)


# --- The draft node as a machine: requests in, segments and prunes out, certain tokens to the
# user.
# Law of this package: nothing is waited for. Verdicts, drafts, credit, requests and losses come
# in any order; after each of them every session goes as far as it can. A lost peer ends sessions,
# never requests: the committed path is here, and a new session goes on from it. Pure.


class DraftMachine:
    """The role ``draft``."""

    def __init__(self, config: DraftConfig) -> None:
        self.config = config

    def initial(self) -> DraftState:
        """A draft node that has met nobody yet."""
        return DraftState(config=self.config, next_session=self.config.first_session)

    def step(self, state: DraftState, event: Input, now: float) -> tuple[DraftState, Effects]:
        """React to one input. Raises ``RemoteProtocolError`` for what a peer must not say."""
        match event:
            case Received():
                state, effects = _received(state, event, now)
            case Computed(Expand() | DraftBatch() as job, result, seconds):
                state, effects = _drafted(state, answers(job, result), seconds)
            case Computed(job):
                raise LocalProtocolError(f"{type(job).__name__} has no result here")
            case Submitted(request):
                state, effects = submitted(state, request, now)
            case Cancelled(request_id):
                state, effects = cancelled(state, request_id, now)
            case Stopped(request_id, length):
                state, effects = stopped(state, request_id, length, now)
            case TimerFired(timer):
                state, effects = fired(state, timer, now)
            case LinkUp(peer):
                state, effects = joined(state, peer)
            case LinkDown(peer):
                state, effects = lost(state, peer, now)
            case TaskDone():
                raise LocalProtocolError("a draft node plans nothing")
            case _:
                assert_never(event)
        state, more = go_on(state, now)
        return state, (*effects, *more)


def _received(state: DraftState, event: Received, now: float) -> tuple[DraftState, Effects]:
    peer, message = event.peer, event.message
    match message:
        case Verdict() if peer == state.config.stages:
            state = replace(state, expected=message.batch_remaining)
            state = planning.on_the_way(state, message, event.seconds, now)
            return _verdict(planning.verified(state, message, now), message, event.tensor), ()
        case Credit(limit, room) if peer == FIRST:
            if limit < state.allowed:
                raise RemoteProtocolError("credit was taken back", peer=peer)
            window = room or state.window or limit
            return replace(state, allowed=limit, window=window), ()
        case Ready(rank, up) if peer == rank:
            echo, state = rank in state.echoes, heard(state, message)
            if up == (peer in state.ready):
                return state, ()  # only its slots have changed: another draft node came or went
            if up:
                return complete(replace(state, ready=state.ready | {peer}))
            down = replace(state, ready=state.ready - {peer})
            return broken(down, now, stood=state.up, echo=echo)
        case PassTimes(rank) if peer == rank:
            state = replace(state, costs=state.costs.with_times(message))
            return state, planning.pass_on(state, message)
        case Schedule() if peer == FIRST:
            return planning.scheduled(state, message), ()
        case Closed() if peer == message.rank:
            return account(state, message)
        case Expanded() if peer == state.config.source:
            return _answered(state, message, peer)
        case _:
            raise RemoteProtocolError(f"unexpected {type(message).__name__}", peer=peer)


def _verdict(state: DraftState, message: Verdict, tensor: object | None) -> DraftState:
    session = state.sessions.get(message.session)
    if session is None:
        if message.session >= state.next_session:
            raise RemoteProtocolError(
                f"session {message.session} was never opened", peer=Rank(state.config.stages)
            )
        return state  # the session is over
    if max((*message.tokens, *message.top_tokens), default=0) >= state.config.vocab:
        raise RemoteProtocolError("a token that is not in the vocabulary")
    return put(state, speculation.judge(session, message, tensor))


def _drafted(state: DraftState, batch: Answers, seconds: float) -> tuple[DraftState, Effects]:
    """The source of this device is free again. Its time was spent for all alike."""
    state = planning.drafted(replace(state, drafting=False), batch, seconds)
    for _, answer in batch:
        state = _expanded(state, answer, seconds / len(batch))
    return state, ()


def _expanded(state: DraftState, answer: Expanded, seconds: float) -> DraftState:
    session = state.sessions.get(answer.session)
    if session is None:
        return state  # the session is over
    return put(state, speculation.expanded(session, answer, seconds, state.costs.pass_seconds))


def _answered(state: DraftState, answer: Expanded, peer: Rank) -> tuple[DraftState, Effects]:
    """The same from another node, which may say anything."""
    if (session := state.sessions.get(answer.session)) is not None:
        asked = session.asked
        if asked is None or answer.base != asked.length:
            raise RemoteProtocolError(f"nothing was asked for session {answer.session}", peer=peer)
        if max(answer.tokens, default=0) >= state.config.vocab:
            raise RemoteProtocolError("a token that is not in the vocabulary", peer=peer)
        state = planning.drafted(state, ((asked.job, answer),), answer.seconds)
    return _expanded(state, answer, answer.seconds), ()
