"""The draft node as a machine: requests in, segments and prunes out, accepted tokens to the user.

Nothing is waited for: verdicts, drafts, credit, requests and losses come in any order, and after
each of them the scheduler runs. A lost peer ends sessions, never requests: the committed path is
here, and a new session goes on from it.
"""

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
from asyncspec_nodes.roles.draft.lifecycle import finish_if_complete, finish_request, unserved
from asyncspec_nodes.roles.draft.scheduler import schedule
from asyncspec_nodes.roles.draft.state import (
    FIRST,
    DraftConfig,
    DraftState,
    Effects,
    QueuedRequest,
)
from asyncspec_nodes.roles.draft.stats import Counters
from asyncspec_protocol.clients import BREAKS
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

REJOIN = "rejoin"
"""The timer of requests that wait for a pipeline that is down."""

MAX_SESSIONS_LEFT = 2**32
"""Sessions that a draft node must be able to open after those a stage has heard of: more than it
ever opens."""


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
                state, effects = _submitted(state, request, now)
            case Cancelled(request_id):
                state, effects = _cancelled(state, request_id, now)
            case Stopped(request_id, length):
                state, effects = _stopped(state, request_id, length, now)
            case TimerFired(timer):
                state, effects = _fired(state, timer, now)
            case LinkUp(peer):
                state, effects = _joined(state, peer)
            case LinkDown(peer):
                state, effects = _lost(state, peer, now)
            case TaskDone():
                raise LocalProtocolError("a draft node plans nothing")
            case _:
                assert_never(event)
        state, more = schedule(state, now)
        return state, (*effects, *more)


# --- Messages, and drafts of this node's device.


def _received(state: DraftState, event: Received, now: float) -> tuple[DraftState, Effects]:
    peer, message = event.peer, event.message
    match message:
        case Verdict() if peer == state.config.stages:
            state = replace(state, expected_verdicts=message.batch_remaining)
            state = _with_link_costs(state, message, event.seconds, now)
            return _verdict(planning.verified(state, message, now), message, event.tensor), ()
        case Credit(limit, room) if peer == FIRST:
            if limit < state.allowed:
                raise RemoteProtocolError("credit was taken back", peer=peer)
            window = room or state.window or limit
            return replace(state, allowed=limit, window=window), ()
        case Ready(rank, up) if peer == rank:
            echo, state = rank in state.break_echoes, _ready(state, message)
            if up == (peer in state.ready):
                return state, ()  # only its slots have changed: another draft node came or went
            if up:
                return _complete(replace(state, ready=state.ready | {peer}))
            down = replace(state, ready=state.ready - {peer})
            return _broken(down, now, was_up=state.up, echo=echo)
        case PassTimes(rank) if peer == rank:
            state = replace(state, costs=state.costs.with_times(message))
            return state, planning.pass_on(state, message)
        case Schedule() if peer == FIRST:
            return planning.scheduled(state, message), ()
        case Closed() if peer == message.rank:
            return lifecycle.record_account(state, message)
        case Expanded() if peer == state.config.source:
            return _answered(state, message, peer)
        case _:
            raise RemoteProtocolError(f"unexpected {type(message).__name__}", peer=peer)


def _with_link_costs(state: DraftState, message: Verdict, seconds: float, now: float) -> DraftState:
    """What a verdict says of the links; its features took ``seconds`` on theirs."""
    costs = state.costs
    if message.feature_ids:
        costs = costs.with_feature_rows(seconds / len(message.feature_ids))
    session = state.sessions.get(message.session)
    probe = None if session is None else session.probe
    if session is not None and probe is not None and probe.segment <= message.segment:
        state = state.with_session(replace(session, probe=None))
        if probe.segment == message.segment:
            costs = costs.with_round_trip(probe.rows, now - probe.sent_at)
    return state if costs is state.costs else replace(state, costs=costs)


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
    return state.with_session(speculation.record_verdict(session, message, tensor))


def _drafted(state: DraftState, batch: Answers, seconds: float) -> tuple[DraftState, Effects]:
    """The source of this device is free again. A batch's time counts in equal parts."""
    state = planning.drafted(replace(state, source_busy=False), batch, seconds)
    for _, answer in batch:
        state = _merged(state, answer, seconds / len(batch))
    return state, ()


def _answered(state: DraftState, answer: Expanded, peer: Rank) -> tuple[DraftState, Effects]:
    """A draft from a source on a node of its own, which may say anything."""
    if (session := state.sessions.get(answer.session)) is not None:
        request = session.draft_request
        if request is None or answer.base != request.length:
            raise RemoteProtocolError(f"nothing was asked for session {answer.session}", peer=peer)
        if max(answer.tokens, default=0) >= state.config.vocab:
            raise RemoteProtocolError("a token that is not in the vocabulary", peer=peer)
        state = planning.drafted(state, ((request.job, answer),), answer.seconds)
    return _merged(state, answer, answer.seconds), ()


def _merged(state: DraftState, answer: Expanded, seconds: float) -> DraftState:
    session = state.sessions.get(answer.session)
    if session is None:
        return state  # the session is over
    slot_seconds = state.costs.pass_seconds
    return state.with_session(speculation.merge_draft(session, answer, seconds, slot_seconds))


# --- Requests: submitted, cancelled, stopped, or failed after a wait.


def _submitted(state: DraftState, request: Request, now: float) -> tuple[DraftState, Effects]:
    """Queue a request. Raises ``LocalProtocolError`` for an impossible one."""
    fine = request.prompt and request.max_new_tokens > 0
    if not fine or request.policy not in state.config.policies:
        raise LocalProtocolError(f"request {request.request} is not one a user may make")
    queued = QueuedRequest(request=request, counters=Counters(started=now))
    state = replace(state, backlog=(*state.backlog, queued))
    if state.up or len(state.backlog) > 1:
        return state, ()
    return state, (SetTimer(REJOIN, now + state.config.rejoin_seconds),)


def _cancelled(state: DraftState, request_id: int, now: float) -> tuple[DraftState, Effects]:
    if (queued := _queued(state, request_id)) is not None:
        return _without_queued(state, queued), (unserved(queued, "cancelled", "", now),)
    for session in state.sessions.values():
        if session.request.request == request_id:
            return finish_request(state, session, "cancelled", now)
    return state, ()


def _stopped(
    state: DraftState, request_id: int, kept: int, now: float
) -> tuple[DraftState, Effects]:
    """An answer ends with its ``kept``-th token. Meanwhile it may have got more of them, may have
    reached another end, or may wait for the pipeline to come back."""
    if (queued := _queued(state, request_id)) is not None:
        _check_kept(kept, queued.given)
        finish = unserved(replace(queued, given=queued.given[:kept]), "stop", "", now)
        return _without_queued(state, queued), (finish,)
    for session in state.sessions.values():
        if session.request.request == request_id:
            _check_kept(kept, session.given)
            return finish_request(state, session.truncated(kept), "stop", now)
    for key, finishing in state.finishing.items():
        if finishing.session.request.request == request_id:
            _check_kept(kept, finishing.session.given)
            session = finishing.session.truncated(kept)
            finishing = replace(finishing, session=session, reason="stop")
            return replace(state, finishing={**state.finishing, key: finishing}), ()
    return state, ()


def _queued(state: DraftState, request_id: int) -> QueuedRequest | None:
    found = (one for one in state.backlog if one.request.request == request_id)
    return next(found, None)


def _without_queued(state: DraftState, queued: QueuedRequest) -> DraftState:
    return replace(state, backlog=tuple(one for one in state.backlog if one is not queued))


def _check_kept(kept: int, given: tuple[int, ...]) -> None:
    if not 0 < kept <= len(given):
        raise LocalProtocolError(f"an answer of {len(given)} tokens cannot end with token {kept}")


def _fired(state: DraftState, timer: str, now: float) -> tuple[DraftState, Effects]:
    """Requests that wait too long fail; one that has ended waits for no account any more."""
    if timer == REJOIN:
        if state.up:
            return state, ()
        detail = "the pipeline is not complete: " + who_is_missing(state)
        failed = tuple(unserved(queued, "error", detail, now) for queued in state.backlog)
        return replace(state, backlog=()), failed
    for key in state.finishing:
        if timer == lifecycle.account_timer(key):
            return finish_if_complete(state, key, force=True)
    return state, ()


def who_is_missing(state: DraftState) -> str:
    """What keeps the pipeline from being complete, for a user."""
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


# --- Peers that come and go.


def _joined(state: DraftState, peer: Rank) -> tuple[DraftState, Effects]:
    """A node can be reached; the first stage's credit starts anew."""
    state = replace(state, peers=state.peers | {peer})
    if peer == FIRST:
        state = replace(state, allowed=0, sent=0, window=0)
    # A stage says when it is ready; a source is as soon as it is there.
    return _complete(state) if peer == state.config.source else (state, ())


def _ready(state: DraftState, message: Ready) -> DraftState:
    """A node has told its slots, and what of earlier sessions is over there. Raises
    ``RemoteProtocolError`` where it has heard of sessions that cannot be this node's."""
    rank, floor = message.rank, message.floor
    echoes = state.break_echoes
    if rank in echoes and (not message.up or floor >= echoes[rank]):
        echoes = {other: since for other, since in echoes.items() if other != rank}
    state = replace(state, slots={**state.slots, rank: message.slots}, break_echoes=echoes)
    if floor >= 0 and rank <= state.config.stages:
        state = replace(state, floor_aware=state.floor_aware | {rank})
        state = lifecycle.released_below(state, rank, floor)
    return _above(state, message.opened, rank)


def _above(state: DraftState, opened: SessionId, peer: Rank) -> DraftState:
    """The next session is above those of this node that a stage has heard of: they were issued
    before it was started again, by a clock that has been set back since. Raises
    ``RemoteProtocolError`` where they cannot be this node's."""
    if opened < state.next_session:
        return state
    first = SessionId(opened + 1)
    if owner(SessionId(first + MAX_SESSIONS_LEFT)) != owner(state.config.first_session):
        raise RemoteProtocolError(f"session {opened} is not this draft node's", peer=peer)
    return replace(state, next_session=first)


def _complete(state: DraftState) -> tuple[DraftState, Effects]:
    """Where the pipeline is complete now, void what earlier sessions left behind on the stages."""
    if not state.up or state.sessions:
        return state, ()
    floor = Floor(first=state.next_session)
    floors = tuple(Send(rank, floor) for rank in sorted(state.peers))
    return state, (*floors, SetTimer(REJOIN, None))


def _lost(state: DraftState, peer: Rank, now: float) -> tuple[DraftState, Effects]:
    """A peer is gone, and with it its accounts and every session."""
    if peer not in state.peers:
        return state, ()
    was_up, peers = state.up, state.peers - {peer}
    echoes = {rank: since for rank, since in state.break_echoes.items() if rank != peer}
    if (before := Rank(peer - 1)) in state.ready:
        echoes[before] = state.next_session
    state = replace(
        state,
        peers=peers,
        ready=state.ready - {peer},
        break_echoes=echoes,
        expected_verdicts=0,
    )
    state, down = _broken(state, now, was_up=was_up)
    effects = list(down)
    for key, finishing in state.finishing.items():
        left = replace(finishing, missing=finishing.missing - {peer})
        state = replace(state, finishing={**state.finishing, key: left})
        state, finished = finish_if_complete(state, key)
        effects.extend(finished)
    return state, tuple(effects)


def _broken(
    state: DraftState, now: float, *, was_up: bool, echo: bool = False
) -> tuple[DraftState, Effects]:
    """The pipeline is broken: all sessions end, and their requests go back to the head of the
    backlog, but for a poison request. ``was_up``: until now, so that they wait for it from now on.
    ``echo``: this break has been seen before."""
    effects: list[Effect] = []
    back, ended = lifecycle.requeue_after_break(state, echo=echo)
    for session in state.sessions.values():
        state, closed = lifecycle.close_session(state, session)
        effects.extend(closed)
    for queued in ended:
        effects += (unserved(queued, "error", lifecycle.poison_detail(queued), now, BREAKS),)
    state = replace(state, backlog=(*back, *state.backlog))
    state = lifecycle.forget_prompts(state, state.cached_prompts)
    if state.backlog and was_up:
        effects.append(SetTimer(REJOIN, now + state.config.rejoin_seconds))
    return state, tuple(effects)
