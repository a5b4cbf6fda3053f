"""The end of a session and of its request, and the stages' accounts of it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from asyncspec.actor.machine import Arm, Finish, Request, Send
from asyncspec_nodes.machines.draft import sharing
from asyncspec_nodes.machines.draft.asking import release
from asyncspec_nodes.machines.draft.counters import Counters, summary
from asyncspec_nodes.machines.draft.leaving import freed, leave, leave_prompts
from asyncspec_nodes.machines.draft.session import DraftSession
from asyncspec_nodes.machines.draft.state import (
    DraftState,
    Effects,
    Ending,
    Job,
    Kept,
    put,
    reachable,
    without,
)
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Close, Closed


def end(
    state: DraftState, session: DraftSession, reason: str, now: float
) -> tuple[DraftState, Effects]:
    """Close a session everywhere. Its request ends when the stages have given account."""
    state, keeps = sharing.keep(state, session)
    state, effects = close(state, session, keep=keeps)
    key = session.session
    missing = frozenset(reachable(state))
    ending = Ending(session=session, reason=reason, ended=now, missing=missing)
    state = replace(state, endings={**state.endings, key: ending})
    return state, (*effects, Arm(account_timer(key), now + state.config.account_seconds))


def give_up(state: DraftState, prompts: Sequence[Kept]) -> tuple[DraftState, Effects]:
    """Prompts that are kept no longer."""
    ranks = reachable(state)
    closes = tuple(Send(rank, Close(one.session)) for one in prompts for rank in ranks)
    return leave_prompts(state, prompts), closes


def close(
    state: DraftState, session: DraftSession, *, keep: bool = False
) -> tuple[DraftState, Effects]:
    """A session is over everywhere; its request may go on in another one. ``keep``: its prompt
    stays on the stages."""
    message = Close(session.session, keep)
    closes = tuple(Send(rank, message) for rank in sorted(state.peers))
    left = leave(without(state, session.session), session)
    return left, (*closes, *release(state, session))


def account(state: DraftState, message: Closed) -> tuple[DraftState, Effects]:
    """A node says what a session has cost it, and that its cache is free of it."""
    state = freed(state, message)
    ending = state.endings.get(message.session)
    if ending is None:
        return _of_broken(state, message), ()
    if message.rank not in ending.missing and message.rank != state.config.source:
        return state, ()
    counters = ending.session.counters.closed(message)
    ending = replace(
        ending,
        session=replace(ending.session, counters=counters),
        missing=ending.missing - {message.rank},
    )
    state = replace(state, endings={**state.endings, message.session: ending})
    return finish_if_complete(state, message.session)


def _of_broken(state: DraftState, message: Closed) -> DraftState:
    """The account of a session that a break has ended, or is about to: the stage may be the first
    to know. If its request has ended it is too late."""
    name = message.session
    for job in state.backlog:
        if name in job.counters.earlier:
            booked = replace(job, counters=job.counters.closed(message))
            left = tuple(booked if other is job else other for other in state.backlog)
            return replace(state, backlog=left)
    for key, session in state.sessions.items():
        if name == key or name in session.counters.earlier:
            return put(state, replace(session, counters=session.counters.closed(message)))
    for key, ending in state.endings.items():
        if name in (session := ending.session).counters.earlier:
            session = replace(session, counters=session.counters.closed(message))
            ending = replace(ending, session=session)
            return replace(state, endings={**state.endings, key: ending})
    return state


def account_timer(session: SessionId) -> str:
    """The name of the timer that bounds the wait for accounts."""
    return f"account:{session}"


def finish_if_complete(
    state: DraftState, key: SessionId, *, force: bool = False
) -> tuple[DraftState, Effects]:
    """A request ends when every stage has given account, or where ``force`` says so."""
    ending = state.endings[key]
    if ending.missing and not force:
        return state, ()
    session = ending.session
    stats = _stats(
        session.request,
        with_turns(session),
        session.given,
        ending.ended,
        stages=session.stages,
    )
    if session.policy.tops:
        stats["lossy"] = 1
    state = replace(state, endings={k: v for k, v in state.endings.items() if k != key})
    finish = Finish(
        session.request.request,
        ending.reason,
        stats,
        session=key,
        earlier=session.counters.earlier,
    )
    return state, (Arm(account_timer(key), None), finish)


def unserved(job: Job, reason: str, detail: str, now: float, code: str = "") -> Finish:
    """The end of a request that is in no session."""
    stats = _stats(job.request, job.counters, job.given, now, stages=0)
    earlier = job.counters.earlier
    return Finish(job.request.request, reason, stats, detail, code=code, earlier=earlier)


def _stats(
    request: Request, counters: Counters, given: tuple[int, ...], ended: float, *, stages: int
) -> dict[str, float]:
    length = len(request.prompt) + len(given)
    return summary(
        counters,
        prompt_tokens=len(request.prompt),
        new_tokens=len(given),
        ended=ended,
        useful_rows=stages * (length - 1 - counters.shared),
    )


def with_turns(session: DraftSession) -> Counters:
    """A session's counters with the turns it has taken."""
    counters = session.counters
    return replace(counters, turns=counters.turns + session.clock.turns)
