"""Requests as their users make, cancel and end them, and those that wait too long."""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec.actor.machine import Arm, Request
from asyncspec_nodes.machines.draft.counters import Counters
from asyncspec_nodes.machines.draft.ends import account_timer, end, finish_if_complete, unserved
from asyncspec_nodes.machines.draft.session import keep
from asyncspec_nodes.machines.draft.state import REJOIN, DraftState, Effects, Job
from asyncspec_protocol.errors import LocalProtocolError


def submitted(state: DraftState, request: Request, now: float) -> tuple[DraftState, Effects]:
    """A request waits for a session. Raises ``LocalProtocolError`` for an impossible one."""
    fine = request.prompt and request.max_new_tokens > 0
    if not fine or request.policy not in state.config.policies:
        raise LocalProtocolError(f"request {request.request} is not one a user may make")
    job = Job(request=request, counters=Counters(started=now))
    state = replace(state, backlog=(*state.backlog, job))
    if state.up or len(state.backlog) > 1:
        return state, ()
    return state, (Arm(REJOIN, now + state.config.rejoin_seconds),)


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
