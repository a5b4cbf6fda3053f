"""Peers that come and go: links, breaks of the pipeline, and requests that go on after them.

Poison requests: a stage that dies of a request comes back, is given it again, and dies again; which
of many sessions it was cannot be seen. So requests that had brought nothing when the pipeline broke
are tried one at a time, behind those whose answers go on, and one with which it breaks again as the
only one without a token is not tried a third time.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from asyncspec.core.machine import Effect, Effects, Send, SetTimer
from asyncspec_nodes.roles.draft.lifecycle import (
    break_timer,
    close_session,
    disk_timer_fired,
    finish_if_complete,
    forget_prompts,
    released,
    stats_timer,
    unserved,
    with_finishing,
    with_slots,
)
from asyncspec_nodes.roles.draft.session import FIRST, DraftSession, DraftState, QueuedRequest
from asyncspec_protocol.clients import BREAKS
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import Rank, SessionId, owner
from asyncspec_protocol.messages import Floor, Ready

REJOIN = "rejoin"
"""The timer of requests that wait for a pipeline that is down."""

MAX_SESSIONS_LEFT = 2**32
"""Sessions that must stay free above any that a stage reports: more than are ever opened."""


def session_timer_fired(state: DraftState, timer: str, now: float) -> tuple[DraftState, Effects]:
    """A request that has ended stops waiting for statistics, or one whose session a node has ended
    for the report of a break: all sessions go on anew."""
    if (dropped := disk_timer_fired(state, timer)) is not None:
        return dropped
    expected = (name for name, session in state.sessions.items() if session.break_expected)
    if timer in map(break_timer, expected):
        return _broken(state, now, was_up=False, last_seen=now)
    key = next((key for key in state.finishing if stats_timer(key) == timer), None)
    return (state, ()) if key is None else finish_if_complete(state, key, force=True)


def link_up(state: DraftState, peer: Rank) -> tuple[DraftState, Effects]:
    """A node can be reached; the first stage's credit starts anew."""
    state = replace(state, peers=state.peers | {peer})
    if peer == FIRST:
        state = replace(state, allowed=0, sent=0, window=0)
    # A stage reports when it is ready; a source is ready at once.
    return _send_floor(state) if peer == state.config.source else (state, ())


def ready_received(state: DraftState, message: Ready, now: float) -> tuple[DraftState, Effects]:
    """A node reports its link to the next stage, its slots, and which sessions are over there.
    Raises ``RemoteProtocolError`` where it reports sessions that cannot be this node's."""
    rank, floor, echoes = message.rank, message.floor, state.break_echoes
    echo = rank in echoes
    if echo and (not message.up or floor >= echoes[rank]):
        echoes = {other: since for other, since in echoes.items() if other != rank}
    state = replace(state, slots={**state.slots, rank: message.slots}, break_echoes=echoes)
    if rank <= state.config.stages:
        computes = (message.layers, message.processor)
        state = replace(state, processors={**state.processors, rank: computes})
    state = replace(state, memory_bound=state.memory_bound.reported(rank, message.memory_kill))
    storing = state.storing_stages - {rank} | ({rank} if message.stores_prefixes else set())
    state = replace(state, storing_stages=storing)
    state, poisoned = _crash_reported(state, rank, message.crash, now)
    if floor >= 0 and rank <= state.config.stages:
        state = replace(state, floor_aware=state.floor_aware | {rank})
        state = released(state, rank, lambda release: release.session < floor)
    if rank == state.config.source:
        if bool(message.features) != state.config.awaits_features:
            error = "its token source is another one: give all nodes the same [draft] source"
            raise RemoteProtocolError(error, peer=rank)
        state = replace(state, source_features=message.features)
    if message.opened >= state.next_session:
        # Issued before this node was started again, by a clock that has been set back since.
        first = SessionId(message.opened + 1)
        if owner(SessionId(first + MAX_SESSIONS_LEFT)) != owner(state.config.first_session):
            error = f"session {message.opened} is not this draft node's"
            raise RemoteProtocolError(error, peer=rank)
        state = replace(state, next_session=first)
    if message.up == (rank in state.ready):
        return state, poisoned  # only its slots have changed: another draft node came or went
    if message.up:
        state, effects = _send_floor(replace(state, ready=state.ready | {rank}))
        return state, (*poisoned, *effects)
    down, last_seen = replace(state, ready=state.ready - {rank}), now - message.silent
    last_seen = -math.inf if echo else last_seen
    state, effects = _broken(down, now, was_up=state.up, last_seen=last_seen)
    return state, (*poisoned, *effects)


def _crash_reported(
    state: DraftState, rank: Rank, crash: int, now: float
) -> tuple[DraftState, Effects]:
    """What a stage says of its last process (``Ready.crash``). All that were in hand are suspects,
    also those that have brought tokens since they were tried; one that was alone twice is not
    tried again."""
    if not crash or state.crashes.get(rank) == crash:
        return state, ()
    state = replace(state, crashes={**state.crashes, rank: crash})
    waiting: list[QueuedRequest] = []
    effects: list[Effect] = []
    for queued in state.backlog:
        counters = queued.counters
        if counters.was_alone is not None:
            queued = replace(queued, counters=counters.crashed())
        if queued.counters.is_poison:
            detail = (
                f"nodes crashed {queued.counters.lone_crashes} times while they worked on this "
                "request alone; their logs say why; it is not tried again"
            )
            effects.append(unserved(state, queued, "error", detail, now, BREAKS))
        else:
            waiting.append(queued)
    return replace(state, backlog=tuple(waiting)), tuple(effects)


def _send_floor(state: DraftState) -> tuple[DraftState, Effects]:
    """Where the pipeline is complete now, end what earlier sessions left behind on the stages. It
    was complete before where prompts are kept, as when a source reports late: they must stay."""
    if not state.up or state.sessions or state.cached_prompts or state.restoring:
        return state, ()
    floor = Floor(first=state.next_session)
    floors = tuple(Send(rank, floor) for rank in sorted(state.peers))
    return state, (*floors, SetTimer(REJOIN, None))


def link_down(
    state: DraftState, peer: Rank, now: float, *, last_seen: float
) -> tuple[DraftState, Effects]:
    """A peer, last heard at a time, is gone, and with it its statistics and every session."""
    if peer not in state.peers:
        return state, ()
    was_up = state.up
    echoes = {rank: since for rank, since in state.break_echoes.items() if rank != peer}
    if (upstream := Rank(peer - 1)) in state.ready:
        echoes[upstream] = state.next_session
    state = replace(
        state,
        peers=state.peers - {peer},
        ready=state.ready - {peer},
        break_echoes=echoes,
        expected_verdicts=0,
    )
    if peer == state.config.source:
        state = replace(state, source_features=())  # the next one may read others
    state, effects = _broken(state, now, was_up=was_up, last_seen=last_seen)
    for key, finishing in state.finishing.items():
        # No statistics of a lost peer will come.
        left = replace(finishing, missing=finishing.missing - {peer})
        state, finished = finish_if_complete(with_finishing(state, left), key)
        effects += finished
    return state, effects


def _broken(
    state: DraftState, now: float, *, was_up: bool, last_seen: float
) -> tuple[DraftState, Effects]:
    """All sessions end, and their requests go back to the head of the backlog, suspects last, but
    for a poison request. ``was_up``: they wait from now on. ``last_seen``: when the lost peer last
    sent something. Where that was before the last break, no session of now can be to blame: it
    is counted already."""
    new_breaks = int(last_seen > state.last_break)
    state = replace(state, last_break=now)
    effects: list[Effect] = []
    silent = [session for session in state.sessions.values() if session.is_unproven]
    waiting: list[QueuedRequest] = []
    memory_bound = state.memory_bound.broken(
        [(session.request.prompt, session.given) for session in state.sessions.values()]
    )
    state = replace(state, memory_bound=memory_bound)
    for session in state.sessions.values():
        queued = _requeued(session, new_breaks, alone=len(state.sessions) == 1)
        breaks = queued.counters.breaks
        if silent == [session] and breaks >= state.config.max_breaks:
            effects.append(unserved(state, queued, "error", _poison_detail(breaks), now, BREAKS))
        else:
            waiting.append(queued)
    waiting.sort(key=lambda queued: (queued.counters.is_suspect, queued.request.request))
    for session in state.sessions.values():
        state, closed = close_session(state, session)
        effects.extend(closed)
    state = replace(state, backlog=(*waiting, *state.backlog))
    state = forget_prompts(state, (*state.cached_prompts, *state.restoring.values()))
    if state.backlog and was_up:
        effects.append(SetTimer(REJOIN, now + state.config.rejoin_seconds))
    return state, tuple(effects)


def _requeued(session: DraftSession, new_breaks: int, *, alone: bool) -> QueuedRequest:
    counters = with_slots(session)
    breaks = counters.breaks if session.is_unproven else 0
    if alone or session.is_unproven:
        breaks += new_breaks
    earlier = (*counters.earlier, session.session)
    counters = replace(
        counters,
        breaks=breaks,
        earlier=earlier,
        was_alone=alone,
        reached=session.tree.bottom + 1 - len(session.request.prompt),
    )
    return QueuedRequest(session.request, counters, session.given)


def _poison_detail(breaks: int) -> str:
    return (
        f"the pipeline broke {breaks} times in a row while it read this request, "
        "and no token came between; the logs of the nodes that ended say why; it is not tried again"
    )


def may_open(state: DraftState, queued: QueuedRequest) -> bool:
    """Whether a session would begin as trials must: a suspect has brought a token, and has passed
    where a node crashed, before any other session is opened, and is opened itself when all others
    have."""
    silent = [session for session in state.sessions.values() if session.is_unproven]
    counters = (queued.counters, *(session.counters for session in silent))
    return not silent or not any(sums.is_suspect for sums in counters)


def rejoin_failed(state: DraftState, now: float) -> tuple[DraftState, Effects]:
    """Requests have waited too long for the pipeline."""
    if state.up:
        return state, ()
    detail = "the pipeline is not complete: " + missing_peers(state)
    failed = tuple(unserved(state, queued, "error", detail, now) for queued in state.backlog)
    return replace(state, backlog=()), failed


def no_link(rank: Rank) -> str:
    """What a stage says, and the draft node of it, while it does not reach the next one."""
    return f"stage {rank} has no link to stage {rank + 1}"


def missing_peers(state: DraftState) -> str:
    """What keeps the pipeline from being complete, for a user."""
    stages, source = range(1, state.config.stages + 1), state.config.source
    absent = [f"stage {r} is not connected" for r in stages if r not in state.peers]
    if source is not None and source not in state.peers:
        absent.append("the token source is not connected")
    cut = [no_link(Rank(r)) for r in stages if r not in state.ready]
    return ", ".join(absent or cut) or "a stage came back too late"
