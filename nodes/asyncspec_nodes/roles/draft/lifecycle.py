"""What is over stays in the books until every stage has freed it.

A ``Close`` goes straight to every stage, and the ``Open`` of whatever takes the place goes through
those before it. Where the straight line is the longer one a stage would hear of the new session
first, and hold both. So slots are free when the stages have said so: with the session's account, or
with the answer to a ``Floor`` where a break of the pipeline has left nobody to give one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from asyncspec.core.machine import Finish, Request, Send, SetTimer
from asyncspec_nodes.roles.draft import prefix_cache
from asyncspec_nodes.roles.draft.admission import slots_kept, slots_needed
from asyncspec_nodes.roles.draft.session import DraftSession
from asyncspec_nodes.roles.draft.speculation import release
from asyncspec_nodes.roles.draft.state import (
    DraftState,
    Effects,
    Ending,
    Job,
    Kept,
    Leaving,
    put,
    reachable,
    without,
)
from asyncspec_nodes.roles.draft.stats import Counters, summary
from asyncspec_protocol.ids import Rank, SessionId
from asyncspec_protocol.messages import Close, Closed


def leave(state: DraftState, session: DraftSession) -> DraftState:
    """A session is over."""
    slots = slots_needed(session.request, session.policy, session.stages)
    return _with(state, Leaving(session.session, slots, state.telling))


def leave_prompts(state: DraftState, prompts: Sequence[Kept]) -> DraftState:
    """Prompts are kept no longer."""
    names = {one.session for one in prompts}
    going = [Leaving(one.session, slots_kept(one), state.telling, prompt=True) for one in prompts]
    left = tuple(one for one in state.kept if one.session not in names)
    return _with(replace(state, kept=left), *going)


def freed(state: DraftState, account: Closed) -> DraftState:
    """A stage has freed a session; and the prompt that was kept of it, unless it says that this
    stays."""
    name, kept = account.session, account.kept
    return _without(
        state, account.rank, lambda one: one.session == name and not (one.prompt and kept)
    )


def freed_below(state: DraftState, rank: Rank, floor: SessionId) -> DraftState:
    """A stage has nothing of all sessions below ``floor``, and never will have."""
    return _without(state, rank, lambda one: one.session < floor)


def _with(state: DraftState, *going: Leaving) -> DraftState:
    return replace(state, leaving=state.leaving + tuple(one for one in going if one.missing))


def _without(state: DraftState, rank: Rank, free: Callable[[Leaving], bool]) -> DraftState:
    if not state.leaving:
        return state
    told = [
        replace(one, missing=one.missing - {rank}) if free(one) else one for one in state.leaving
    ]
    return replace(state, leaving=tuple(one for one in told if one.missing))


# --- The end of a session and of its request, and the stages' accounts of it.


def end(
    state: DraftState, session: DraftSession, reason: str, now: float
) -> tuple[DraftState, Effects]:
    """Close a session everywhere. Its request ends when the stages have given account."""
    state, keeps = prefix_cache.keep(state, session)
    state, effects = close(state, session, keep=keeps)
    key = session.session
    missing = frozenset(reachable(state))
    ending = Ending(session=session, reason=reason, ended=now, missing=missing)
    state = replace(state, endings={**state.endings, key: ending})
    return state, (*effects, SetTimer(account_timer(key), now + state.config.account_seconds))


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
    if session.policy.top_logprobs:
        stats["lossy"] = 1
    state = replace(state, endings={k: v for k, v in state.endings.items() if k != key})
    finish = Finish(
        session.request.request,
        ending.reason,
        stats,
        session=key,
        earlier=session.counters.earlier,
    )
    return state, (SetTimer(account_timer(key), None), finish)


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


# --- Requests that break the pipeline whenever they are read: found among others, and ended.
# A stage that dies of a request comes back, is given it again, and dies again. Nobody can see
# which of many sessions it was. So those that have brought nothing between two breaks are tried
# one at a time: until one has brought a token no other one begins. The only one of which nothing
# came, when it has seen enough breaks in a row, is not tried again.

SUSPECT = 2
"""Breaks in a row that a request may see without a token between before it is tried alone: machines
fail for other reasons too, and one after another sessions begin slowly."""


def back(state: DraftState, *, echo: bool) -> tuple[tuple[Job, ...], tuple[Job, ...]]:
    """The pipeline has broken: the requests of all sessions, as they wait for it, those to be tried
    first; and those that are not tried again. ``echo``: this break was counted before."""
    silent = [session for session in state.sessions.values() if not session.committed]
    waiting, ended = list[Job](), list[Job]()
    for session in state.sessions.values():
        job = _struck(session, 0 if echo else 1)
        breaks = job.counters.breaks
        blamed = silent == [session] and breaks >= state.config.most_breaks
        (ended if blamed else waiting).append(job)
    waiting.sort(key=lambda job: (not _suspected(job.counters), job.request.request))
    return tuple(waiting), tuple(ended)


def on_trial(state: DraftState) -> bool:
    """Whether a session is tried: no other one begins until it has brought a token."""
    return any(_suspected(s.counters) and not s.committed for s in state.sessions.values())


def why_ended(job: Job) -> str:
    """What the user of a request that is not tried again is told."""
    return (
        f"the pipeline broke {job.counters.breaks} times in a row while it read this request, and "
        "no token came between; the logs of the nodes that ended say why; it is not tried again"
    )


def _struck(session: DraftSession, times: int) -> Job:
    counters = with_turns(session)
    breaks = times + (0 if session.committed else counters.breaks)
    earlier = (*counters.earlier, session.session)
    counters = replace(counters, breaks=breaks, earlier=earlier)
    return Job(session.request, counters, session.given)


def _suspected(counters: Counters) -> bool:
    return counters.breaks >= SUSPECT
