"""The draft node as a machine: requests in, segments and prunes out, accepted tokens to the user.

Nothing is waited for: verdicts, drafts, credit, requests and losses come in any order, and after
each of them that may change what is done the scheduler runs. A lost peer ends sessions, never
requests: the committed path is here, and a new session continues from it.

Messages stand for ``Received`` of them as events, and for ``Send`` of them as effects:

| event | handler | effects |
| --- | --- | --- |
| Verdict | verdicts.verdict_received | |
| Expanded | drafting.expanded_received | |
| Credit | replace | |
| Ready | recovery.ready_received | Floor Close Compute Abandon Finish SetTimer |
| PassTimes | rates.pass_on | PassTimes |
| Schedule | state.with_session | |
| Closed | lifecycle.record_stage_stats | Close Finish SetTimer |
| Computed | drafting.drafted | |
| PrefixRead | lifecycle.features_read | Close SetTimer |
| PrefixWritten | replace | |
| Submitted | _submitted | SetTimer |
| Cancelled | _cancelled | Close Compute Abandon Finish SetTimer |
| Stopped | _stopped | Close Compute Abandon Finish SetTimer |
| TimerFired | recovery.rejoin_failed | Finish |
| | recovery.session_timer_fired | Close Compute Abandon Finish SetTimer |
| LinkUp | recovery.link_up | Floor SetTimer |
| LinkDown | recovery.link_down | Close Compute Abandon Finish SetTimer |
| any, but for PassTimes and most Credit | schedule | Open Restore Segment PruneIndices Close |
| | | Expand Withdraw Features Rates PassTimes ReadPrefix WritePrefix |
| | | Compute Abandon Emit Finish SetTimer |
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from asyncspec.core.cost_model.pipeline import PipelineCosts
from asyncspec.core.jobs import DraftBatch
from asyncspec.core.machine import (
    Cancelled,
    Computed,
    Effects,
    Input,
    LinkDown,
    LinkUp,
    PrefixRead,
    PrefixWritten,
    Received,
    Request,
    SetTimer,
    Stopped,
    Submitted,
    TimerFired,
)
from asyncspec.core.stats import Counters
from asyncspec.source.base import draft_results
from asyncspec_nodes.roles.draft import drafting, lifecycle, rates, recovery, verdicts
from asyncspec_nodes.roles.draft.config import DraftConfig
from asyncspec_nodes.roles.draft.scheduler import schedule
from asyncspec_nodes.roles.draft.session import (
    FIRST,
    DraftSession,
    DraftState,
    FinishingRequest,
    QueuedRequest,
)
from asyncspec_protocol.errors import LocalProtocolError, RemoteProtocolError
from asyncspec_protocol.messages import (
    Closed,
    Credit,
    Expand,
    Expanded,
    Message,
    PassTimes,
    Ready,
    Schedule,
    Verdict,
)


class DraftMachine:
    """The role ``draft``."""

    def __init__(self, config: DraftConfig) -> None:
        self.config = config

    def initial(self) -> DraftState:
        """A draft node without peers."""
        config = self.config
        costs = PipelineCosts(
            processors=config.processors or math.inf, batch_rows=config.batch_rows
        )
        return DraftState(config=config, next_session=config.first_session, costs=costs)

    def step(self, state: DraftState, event: Input, now: float) -> tuple[DraftState, Effects]:
        """Handle one input. Raises ``RemoteProtocolError`` for what a peer must not send."""
        if isinstance(event, Received) and _only_noted(state, event.message):
            return _received(state, event, now)
        match event:
            case Received():
                state, effects = _received(state, event, now)
            case Computed(Expand() | DraftBatch() as job, result, seconds):
                state = drafting.drafted(state, draft_results(job, result), seconds, now)
                effects = ()
            case PrefixRead():
                state, effects = lifecycle.features_read(state, event)
            case PrefixWritten():
                state = replace(state, feature_writes=state.feature_writes - 1)
                effects = ()
            case Submitted(request):
                state, effects = _submitted(state, request, now)
            case Cancelled(request_id):
                state, effects = _cancelled(state, request_id, now)
            case Stopped(request_id, length):
                state, effects = _stopped(state, request_id, length, now)
            case TimerFired(recovery.REJOIN):
                state, effects = recovery.rejoin_failed(state, now)
            case TimerFired(timer):
                state, effects = recovery.session_timer_fired(state, timer, now)
            case LinkUp(peer):
                state, effects = recovery.link_up(state, peer)
            case LinkDown(peer, _, silent):
                state, effects = recovery.link_down(state, peer, now, last_seen=now - silent)
            case _:
                raise LocalProtocolError(f"a draft node has no use for {type(event).__name__}")
        state, more = schedule(state, now)
        return state, (*effects, *more)


def _only_noted(state: DraftState, message: Message) -> bool:
    """Whether the scheduler has nothing to do after a message: pass times, which later decisions
    read, and credit where there was some left."""
    if not isinstance(message, Credit):
        return isinstance(message, PassTimes)
    idle = any(session.policy.waits_for_idle_stage for session in state.sessions.values())
    return state.sent < state.allowed and not idle


def _received(state: DraftState, event: Received, now: float) -> tuple[DraftState, Effects]:
    peer, message = event.peer, event.message
    match message:
        case Verdict() if peer == state.config.stages:
            return verdicts.verdict_received(state, event, message, now), ()
        case Credit(limit, room) if peer == FIRST:
            if limit < state.allowed:
                raise RemoteProtocolError("credit was taken back", peer=peer)
            return replace(state, allowed=limit, window=room or state.window or limit), ()
        case Ready(rank) if peer == rank:
            return recovery.ready_received(state, message, now)
        case PassTimes(rank) if peer == rank:
            state = replace(state, costs=state.costs.with_times(message))
            return state, rates.pass_on(state, message)
        case Schedule(name) if peer == FIRST:
            if (session := state.sessions.get(name)) is not None:
                state = state.with_session(replace(session, planned_length=message.length))
            return state, ()
        case Closed() if peer == message.rank:
            return lifecycle.record_stage_stats(state, message, now)
        case Expanded() if peer == state.config.source:
            return drafting.expanded_received(state, message, peer), ()
        case _:
            raise RemoteProtocolError(f"unexpected {type(message).__name__}", peer=peer)


def _submitted(state: DraftState, request: Request, now: float) -> tuple[DraftState, Effects]:
    """Queue a request. Raises ``LocalProtocolError`` for an impossible one."""
    limit = request.max_new_tokens
    fine = request.prompt and limit >= 0 and max(1, limit) > len(request.given)
    if not fine or request.policy not in state.config.policies:
        raise LocalProtocolError(f"request {request.request} is not one a user may make")
    queued = QueuedRequest(request, Counters(started=now), request.given)
    state = replace(state, backlog=(*state.backlog, queued))
    if state.up or len(state.backlog) > 1:
        return state, ()
    return state, (SetTimer(recovery.REJOIN, now + state.config.rejoin_seconds),)


def _cancelled(state: DraftState, request_id: int, now: float) -> tuple[DraftState, Effects]:
    match _find(state, request_id):
        case QueuedRequest() as queued:
            finish = lifecycle.unserved(state, queued, "cancelled", "", now)
            return _dequeued(state, queued), (finish,)
        case DraftSession() as session:
            return lifecycle.finish_request(state, session, "cancelled", now)
        case _:
            return state, ()


def _stopped(
    state: DraftState, request_id: int, kept: int, now: float
) -> tuple[DraftState, Effects]:
    """An answer ends with its ``kept``-th token. Meanwhile it may have more of them, may have
    reached another end, or may wait for the pipeline to come back."""
    holder = _find(state, request_id)
    if holder is None:
        return state, ()
    tokens = holder.session.given if isinstance(holder, FinishingRequest) else holder.given
    if not 0 < kept <= len(tokens):
        raise LocalProtocolError(f"an answer of {len(tokens)} tokens cannot end with token {kept}")
    match holder:
        case QueuedRequest():
            finish = lifecycle.unserved(
                state, replace(holder, given=tokens[:kept]), "stop", "", now
            )
            return _dequeued(state, holder), (finish,)
        case DraftSession():
            return lifecycle.finish_request(state, holder.truncated(kept), "stop", now)
        case FinishingRequest(session):
            holder = replace(holder, session=session.truncated(kept), reason="stop")
            return replace(state, finishing={**state.finishing, session.session: holder}), ()


def _find(
    state: DraftState, request_id: int
) -> QueuedRequest | DraftSession | FinishingRequest | None:
    for queued in state.backlog:
        if queued.request.request == request_id:
            return queued
    for session in state.sessions.values():
        if session.request.request == request_id:
            return session
    finishing = state.finishing.values()
    return next((one for one in finishing if one.session.request.request == request_id), None)


def _dequeued(state: DraftState, queued: QueuedRequest) -> DraftState:
    return replace(state, backlog=tuple(one for one in state.backlog if one is not queued))
