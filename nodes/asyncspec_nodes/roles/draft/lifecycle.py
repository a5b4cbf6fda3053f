"""How sessions and requests end: close, statistics, pending releases.

A ``Close`` goes straight to every stage, and the ``Open`` of the next session through those before
it, which may be the faster way. So that no stage has to hold both, cache slots count as taken until
the stage reports that they are free: with the session's statistics, or with its answer to a
``Floor`` where a break of the pipeline has ended the session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from msgspec.structs import replace

from asyncspec.core.machine import Effects, Finish, PrefixRead, Send, SetTimer
from asyncspec.core.stats import Counters, summary
from asyncspec_nodes.roles.draft import disk_cache, prefix_cache
from asyncspec_nodes.roles.draft.drafting import release_source
from asyncspec_nodes.roles.draft.session import (
    CachedPrompt,
    DraftSession,
    DraftState,
    FinishingRequest,
    PendingRelease,
    QueuedRequest,
)
from asyncspec_protocol.ids import Rank, SessionId
from asyncspec_protocol.messages import Close, Closed, PruneIndices

C = TypeVar("C", QueuedRequest, DraftSession)


def finish_request(
    state: DraftState,
    session: DraftSession,
    reason: str,
    now: float,
    prune: PruneIndices | None = None,
) -> tuple[DraftState, Effects]:
    """Close a session everywhere; its request ends when the stages have reported its statistics.
    ``prune``: commits the end of its answer, where that is to stay in the caches."""
    served = len(session.request.prompt) + session.new_tokens
    state = replace(state, memory_bound=state.memory_bound.ended(served))
    state, cached = prefix_cache.cache_prompt(state, session)
    prunes: Effects = ()
    if cached and prune is not None:
        prunes = tuple(Send(rank, prune) for rank in state.linked_stages)
    stored: Effects = ()
    if cached:
        state, stored = disk_cache.store_features(state, session, answered=True)
    state, effects = close_session(state, session, keep=cached)
    finishing = FinishingRequest(session, reason, now, missing=frozenset(state.linked_stages))
    timer = SetTimer(stats_timer(session.session), now + state.config.stats_seconds)
    return with_finishing(state, finishing), (*prunes, *stored, *effects, timer)


def close_session(
    state: DraftState, session: DraftSession, *, keep: bool = False
) -> tuple[DraftState, Effects]:
    """Close a session, not its request. ``keep``: the stages keep its prompt and answer."""
    message = Close(session.session, keep, session.length - 1 if keep else 0)
    if keep and (keys := disk_cache.stored_as(state, session)):
        message = replace(message, stored_as=keys)
    closes = tuple(Send(rank, message) for rank in sorted(state.peers))
    release = PendingRelease(session.session, session.slots, state.floor_aware)
    state = with_releases(state.without_session(session.session), release)
    unset = (SetTimer(break_timer(session.session), None),) if session.break_expected else ()
    return state, (*closes, *release_source(state, session), *unset)


def drop_prompts(state: DraftState, prompts: Sequence[CachedPrompt]) -> tuple[DraftState, Effects]:
    """Drop cached prompts on every stage."""
    ranks = state.linked_stages
    closes = tuple(Send(rank, Close(one.session)) for one in prompts for rank in ranks)
    return forget_prompts(state, prompts), closes


def forget_prompts(state: DraftState, prompts: Sequence[CachedPrompt]) -> DraftState:
    """The state without cached prompts that the stages drop."""
    names = {one.session for one in prompts}
    aware = state.floor_aware
    releases = [PendingRelease(one.session, one.slots, aware, is_prompt=True) for one in prompts]
    left = tuple(one for one in state.cached_prompts if one.session not in names)
    state = disk_cache.without(state, *names)
    return with_releases(replace(state, cached_prompts=left), *releases)


def stats_timer(session: SessionId) -> str:
    """The name of the timer that bounds the wait for statistics."""
    return f"stats:{session}"


def break_timer(session: SessionId) -> str:
    """The name of the timer that bounds the wait for the report of a break."""
    return f"break:{session}"


def record_stage_stats(
    state: DraftState, message: Closed, now: float
) -> tuple[DraftState, Effects]:
    """A node reports what a session cost it, and that its cache is free of it."""
    name, kept = message.session, message.kept
    state = released(
        state,
        message.rank,
        lambda release: release.session == name and not (release.is_prompt and kept),
    )
    if name in state.restoring:
        return _disk_reported(state, message)
    finishing = state.finishing.get(name)
    if message.rank <= state.config.stages:
        state = prefix_cache.reported(state, message)
    if finishing is None:
        return _expect_break(_record_late_stats(state, message), name, now)
    if message.rank not in finishing.missing and message.rank != state.config.source:
        return state, ()
    counters = finishing.session.counters.with_stage_stats(message)
    finishing = replace(
        finishing,
        session=replace(finishing.session, counters=counters),
        missing=finishing.missing - {message.rank},
    )
    return finish_if_complete(with_finishing(state, finishing), name)


def _disk_reported(state: DraftState, message: Closed) -> tuple[DraftState, Effects]:
    """A stage has read what it has of a prompt on disk."""
    return _disk_answered(*disk_cache.reported(state, message))


def features_read(state: DraftState, event: PrefixRead) -> tuple[DraftState, Effects]:
    """This node has read what it has of a prompt's features on disk."""
    return _disk_answered(*disk_cache.features_read(state, event))


def _disk_answered(
    state: DraftState, useless: CachedPrompt | None, effects: Effects
) -> tuple[DraftState, Effects]:
    if useless is None:
        return state, effects
    state, dropped = drop_prompts(state, [useless])
    return state, (*effects, *dropped)


def disk_timer_fired(state: DraftState, timer: str) -> tuple[DraftState, Effects] | None:
    """The disks have taken too long, and the prompt is computed again; None: another timer."""
    prompts = state.restoring.values()
    late = [one for one in prompts if disk_cache.restore_timer(one.session) == timer]
    return drop_prompts(state, late) if late else None


def _expect_break(state: DraftState, name: SessionId, now: float) -> tuple[DraftState, Effects]:
    """A node has ended a session, which is open here. That it has lost a neighbour is about to be
    reported; if nothing comes, the pipeline counts as broken all the same."""
    session = state.sessions.get(name)
    if session is None or session.break_expected:
        return state, ()
    state = state.with_session(replace(session, break_expected=True))
    return state, (SetTimer(break_timer(name), now + state.config.rejoin_seconds),)


def _record_late_stats(state: DraftState, message: Closed) -> DraftState:
    """The statistics of a session that a break has ended, or is about to, as a stage may be the
    first to know. Where its request has ended it is too late."""
    name = message.session

    def booked(entry: C, *sessions: SessionId) -> C:
        if name not in (*sessions, *entry.counters.earlier):
            return entry
        return replace(entry, counters=entry.counters.with_stage_stats(message))

    finishing = state.finishing.items()
    return replace(
        state,
        backlog=tuple(map(booked, state.backlog)),
        sessions={key: booked(session, key) for key, session in state.sessions.items()},
        finishing={key: replace(one, session=booked(one.session)) for key, one in finishing},
    )


def with_finishing(state: DraftState, finishing: FinishingRequest) -> DraftState:
    """The state with a request that waits for statistics, or with what it has of them."""
    key = finishing.session.session
    return replace(state, finishing={**state.finishing, key: finishing})


def finish_if_complete(
    state: DraftState, key: SessionId, *, force: bool = False
) -> tuple[DraftState, Effects]:
    """End a request when every stage has reported statistics, or with ``force``."""
    finishing = state.finishing[key]
    if finishing.missing and not force:
        return state, ()
    session = finishing.session
    request, counters = session.request, with_slots(session)
    stats = summary(
        counters,
        prompt_tokens=len(request.prompt),
        new_tokens=session.new_tokens,
        ended=finishing.ended_at,
        stages=session.stages,
        given=len(request.given),
    )
    stats.update(session.policy.stats(state.memory(session)))
    if not session.policy.uses_draft and stats["tokens_per_second"]:
        stats["plain_tokens_per_second"] = stats["tokens_per_second"]
    stats.update(_beside_plain(stats, state.costs.plain_seconds))
    if session.policy.top_logprobs:
        stats["lossy"] = 1
    if state.config.usable_drafts is not None:
        stats["usable_drafts_rate"] = state.config.usable_drafts
    finish = Finish(request.request, finishing.reason, key, stats, earlier=counters.earlier)
    left = {k: v for k, v in state.finishing.items() if k != key}
    return replace(state, finishing=left), (SetTimer(stats_timer(key), None), finish)


def _beside_plain(stats: Mapping[str, float], plain_seconds: float) -> dict[str, float]:
    """How an answer's speed compares with decoding without speculation: as the policy has measured
    that, or as it is expected to be, a token every ``plain_seconds``; 0: not known."""
    measured = "plain_tokens_per_second" in stats
    if measured:
        plain = stats["plain_tokens_per_second"]
    else:
        plain = 1.0 / plain_seconds if plain_seconds else 0.0
    reached = stats["tokens_per_second"]
    if not plain or not reached:
        return {}
    return {
        "plain_tokens_per_second": plain,
        "plain_measured": float(measured),
        "times_plain_rate": reached / plain,
    }


def unserved(
    state: DraftState,
    queued: QueuedRequest,
    reason: str,
    detail: str,
    now: float,
    code: str = "",
) -> Finish:
    """The end of a request that is in no session."""
    request, counters = queued.request, queued.counters
    stats = summary(
        counters,
        prompt_tokens=len(request.prompt),
        new_tokens=len(queued.given),
        ended=now,
        stages=state.config.stages,
        given=len(request.given),
    )
    return Finish(
        request.request, reason, stats=stats, detail=detail, code=code, earlier=counters.earlier
    )


def with_slots(session: DraftSession) -> Counters:
    """A session's counters with the pipeline slots it has taken."""
    return session.counters.plus(turns=session.clock.decoding)


def with_releases(state: DraftState, *releases: PendingRelease) -> DraftState:
    """The state with releases that some stage has still to report."""
    pending = tuple(one for one in releases if one.missing)
    return replace(state, pending_releases=state.pending_releases + pending)


def released(
    state: DraftState, rank: Rank, is_free: Callable[[PendingRelease], bool]
) -> DraftState:
    """A stage has freed the cache slots of some pending releases."""
    if not state.pending_releases:
        return state
    pending = [
        replace(one, missing=one.missing - {rank}) if is_free(one) else one
        for one in state.pending_releases
    ]
    return replace(state, pending_releases=tuple(one for one in pending if one.missing))
