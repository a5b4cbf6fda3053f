"""How sessions and requests end: close, accounts, pending releases, poison requests.

A ``Close`` goes straight to every stage, and the ``Open`` of the next session through those before
it, which may be the faster way. So that no stage has to hold both, cache slots count as taken until
the stage says that they are free: with the session's account, or with its answer to a ``Floor``
where a break of the pipeline has left nobody to give one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from asyncspec.core.machine import Finish, Request, Send, SetTimer
from asyncspec_nodes.roles.draft import prefix_cache
from asyncspec_nodes.roles.draft.speculation import release_source
from asyncspec_nodes.roles.draft.state import (
    CachedPrompt,
    DraftSession,
    DraftState,
    Effects,
    FinishingRequest,
    PendingRelease,
    QueuedRequest,
)
from asyncspec_nodes.roles.draft.stats import Counters, summary
from asyncspec_protocol.ids import Rank, SessionId
from asyncspec_protocol.messages import Close, Closed

# --- Sessions are closed; their requests end when the stages have given account.


def finish_request(
    state: DraftState, session: DraftSession, reason: str, now: float
) -> tuple[DraftState, Effects]:
    """Close a session everywhere; its request ends when the stages have given account."""
    state, cached = prefix_cache.cache_prompt(state, session)
    state, effects = close_session(state, session, keep=cached)
    key, missing = session.session, frozenset(state.linked_stages)
    finishing = FinishingRequest(session, reason, ended_at=now, missing=missing)
    state = _with_finishing(state, finishing)
    return state, (*effects, SetTimer(account_timer(key), now + state.config.account_seconds))


def close_session(
    state: DraftState, session: DraftSession, *, keep: bool = False
) -> tuple[DraftState, Effects]:
    """A session is over everywhere; its request may go on in another one. ``keep``: its prompt
    stays on the stages."""
    message = Close(session.session, keep)
    closes = tuple(Send(rank, message) for rank in sorted(state.peers))
    release = PendingRelease(session.session, session.slots, state.floor_aware)
    state = _with_releases(state.without_session(session.session), release)
    return state, (*closes, *release_source(state, session))


def drop_prompts(state: DraftState, prompts: Sequence[CachedPrompt]) -> tuple[DraftState, Effects]:
    """Prompts are cached no longer."""
    ranks = state.linked_stages
    closes = tuple(Send(rank, Close(one.session)) for one in prompts for rank in ranks)
    return forget_prompts(state, prompts), closes


def forget_prompts(state: DraftState, prompts: Sequence[CachedPrompt]) -> DraftState:
    """Prompts are cached no longer, and every stage will find out by itself."""
    names = {one.session for one in prompts}
    releases = [
        PendingRelease(one.session, one.slots, state.floor_aware, is_prompt=True) for one in prompts
    ]
    left = tuple(one for one in state.cached_prompts if one.session not in names)
    return _with_releases(replace(state, cached_prompts=left), *releases)


def record_account(state: DraftState, message: Closed) -> tuple[DraftState, Effects]:
    """A node has told what a session cost it, and that its cache is free of it."""
    name, kept = message.session, message.kept
    state = _released(
        state, message.rank, lambda one: one.session == name and not (one.is_prompt and kept)
    )
    finishing = state.finishing.get(name)
    if finishing is None:
        return _record_late_account(state, message), ()
    if message.rank not in finishing.missing and message.rank != state.config.source:
        return state, ()
    finishing = replace(
        finishing,
        session=_with_account(finishing.session, message),
        missing=finishing.missing - {message.rank},
    )
    return finish_if_complete(_with_finishing(state, finishing), name)


def _record_late_account(state: DraftState, message: Closed) -> DraftState:
    """The account of a session that a break has ended, or is about to, as a stage may be the first
    to know. Where its request has ended it is too late."""
    name = message.session
    for queued in state.backlog:
        if name in queued.counters.earlier:
            booked = replace(queued, counters=queued.counters.with_account(message))
            left = tuple(booked if other is queued else other for other in state.backlog)
            return replace(state, backlog=left)
    for key, session in state.sessions.items():
        if name == key or name in session.counters.earlier:
            return state.with_session(_with_account(session, message))
    for finishing in state.finishing.values():
        if name in (session := finishing.session).counters.earlier:
            return _with_finishing(
                state, replace(finishing, session=_with_account(session, message))
            )
    return state


def _with_account(session: DraftSession, message: Closed) -> DraftSession:
    return replace(session, counters=session.counters.with_account(message))


def _with_finishing(state: DraftState, finishing: FinishingRequest) -> DraftState:
    key = finishing.session.session
    return replace(state, finishing={**state.finishing, key: finishing})


def account_timer(session: SessionId) -> str:
    """The name of the timer that bounds the wait for accounts."""
    return f"account:{session}"


def finish_if_complete(
    state: DraftState, key: SessionId, *, force: bool = False
) -> tuple[DraftState, Effects]:
    """End a request when every stage has given account, or with ``force``."""
    finishing = state.finishing[key]
    if finishing.missing and not force:
        return state, ()
    session = finishing.session
    counters = _with_slots(session)
    ended, stages = finishing.ended_at, session.stages
    stats = _stats(session.request, counters, session.given, ended, stages=stages)
    if session.policy.top_logprobs:
        stats["lossy"] = 1
    left = {k: v for k, v in state.finishing.items() if k != key}
    finish = Finish(
        session.request.request,
        finishing.reason,
        stats,
        session=key,
        earlier=counters.earlier,
    )
    return replace(state, finishing=left), (SetTimer(account_timer(key), None), finish)


def unserved(queued: QueuedRequest, reason: str, detail: str, now: float, code: str = "") -> Finish:
    """The end of a request that is in no session."""
    request, counters = queued.request, queued.counters
    stats = _stats(request, counters, queued.given, now, stages=0)
    return Finish(request.request, reason, stats, detail, code=code, earlier=counters.earlier)


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


def _with_slots(session: DraftSession) -> Counters:
    """A session's counters with the pipeline slots it has taken."""
    counters = session.counters
    return replace(counters, turns=counters.turns + session.clock.decoding)


# --- Cache slots that some stage has not freed yet.


def released_below(state: DraftState, rank: Rank, floor: SessionId) -> DraftState:
    """A stage has nothing of all sessions below ``floor``, and never will have."""
    return _released(state, rank, lambda one: one.session < floor)


def _with_releases(state: DraftState, *releases: PendingRelease) -> DraftState:
    pending = tuple(one for one in releases if one.missing)
    return replace(state, pending_releases=state.pending_releases + pending)


def _released(
    state: DraftState, rank: Rank, is_free: Callable[[PendingRelease], bool]
) -> DraftState:
    if not state.pending_releases:
        return state
    told = [
        replace(one, missing=one.missing - {rank}) if is_free(one) else one
        for one in state.pending_releases
    ]
    return replace(state, pending_releases=tuple(one for one in told if one.missing))


# --- Poison requests: those that break the pipeline whenever they are read.
# A stage that dies of a request comes back, is given it again, and dies again; which of many
# sessions it was cannot be seen. So requests that have brought nothing between two breaks are
# tried one at a time, and one that has seen enough breaks in a row as the only one without a
# token is not tried again.

SUSPECT_BREAKS = 2
"""Breaks in a row without a token between after which a request is tried alone: machines fail for
other reasons too, and one after another sessions begin slowly."""


def requeue_after_break(
    state: DraftState, *, echo: bool
) -> tuple[tuple[QueuedRequest, ...], tuple[QueuedRequest, ...]]:
    """The requests of all sessions as they wait for the pipeline, suspects first; and those that
    are not tried again. ``echo``: this break was counted before."""
    silent = [session for session in state.sessions.values() if not session.committed]
    waiting, ended = list[QueuedRequest](), list[QueuedRequest]()
    for session in state.sessions.values():
        queued = _requeued(session, 0 if echo else 1)
        breaks = queued.counters.breaks
        blamed = silent == [session] and breaks >= state.config.max_breaks
        (ended if blamed else waiting).append(queued)
    waiting.sort(key=lambda queued: (not _is_suspect(queued.counters), queued.request.request))
    return tuple(waiting), tuple(ended)


def on_trial(state: DraftState) -> bool:
    """Whether a suspect is tried: no other session is opened until it has brought a token."""
    return any(_is_suspect(s.counters) and not s.committed for s in state.sessions.values())


def poison_detail(queued: QueuedRequest) -> str:
    """What the user of a request that is not tried again is told."""
    return (
        f"the pipeline broke {queued.counters.breaks} times in a row while it read this request, "
        "and no token came between; the logs of the nodes that ended say why; it is not tried again"
    )


def _requeued(session: DraftSession, new_breaks: int) -> QueuedRequest:
    counters = _with_slots(session)
    breaks = new_breaks + (0 if session.committed else counters.breaks)
    earlier = (*counters.earlier, session.session)
    counters = replace(counters, breaks=breaks, earlier=earlier)
    return QueuedRequest(session.request, counters, session.given)


def _is_suspect(counters: Counters) -> bool:
    return counters.breaks >= SUSPECT_BREAKS
