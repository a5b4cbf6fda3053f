"""Credit for upstream peers, and cost reports to the draft nodes.

Segments of ``window`` passes may wait here. A link with latency holds segments too, and so does the
way of the credit back. How many is measured: a segment that waited for credit and finds this stage
idle, or in a pass that it could have shared, shows that there was too little, a queue that is still
full when a pass starts that there was too much. Each link has its own count, so a draft node cannot
take another's places.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.cost_model.passes import interpolate
from asyncspec.core.cost_model.rows import BatchCost
from asyncspec.core.machine import Abandon, Effects, Send
from asyncspec_nodes.roles.verify.session import (
    Pass,
    QueuedSegment,
    VerifyState,
    drop_dead_rows,
    survivors,
    takes_more,
)
from asyncspec_protocol.ids import Rank, SessionId
from asyncspec_protocol.messages import Credit, PassTimes, Segment


def queued(state: VerifyState, peer: Rank) -> int:
    """Segments from a peer that wait here."""
    if len(state.inbound) == 1:
        return len(state.queue)
    upstream_of = state.config.upstream_of
    return sum([upstream_of(segment.session) == peer for segment in state.queue])


def queue_limit(state: VerifyState, peer: Rank) -> int:
    """Places in the queue for a peer: ``window`` passes of as many segments as fit in one."""
    sessions = len(state.sessions)
    if len(state.inbound) > 1:
        upstream_of = state.config.upstream_of
        sessions = sum([upstream_of(session) == peer for session in state.sessions])
    return state.config.window * max(1, min(state.segments_per_pass, sessions))


def grant(state: VerifyState, peers: Iterable[Rank] | None = None) -> tuple[VerifyState, Effects]:
    """Grant ``peers``, else all upstream ones, the credit there is; it is never taken back."""
    effects: list[Send] = []
    for peer in state.inbound if peers is None else peers:
        credit, places = state.inbound[peer], queue_limit(state, peer)
        limit = credit.received - queued(state, peer) + places + credit.extra
        if limit > credit.granted:
            state = state.with_credit(peer, replace(credit, granted=limit))
            effects.append(Send(peer, Credit(limit, places, state.row_seconds)))
    return state, tuple(effects)


def extend_credit(state: VerifyState, peer: Rank, message: Segment) -> VerifyState:
    """Extend the credit of a link whose ``message`` waited for it while this stage was idle, or had
    begun a pass that would have taken it in."""
    credit, config = state.inbound[peer], state.config
    if not message.waited or credit.extra >= config.max_window - config.window or state.queue:
        return state
    if state.running is None:
        missed = not state.outbox
    else:
        missed = config.rank > 1 and _would_share(state, state.running, message)
    return state.with_credit(peer, replace(credit, extra=credit.extra + 1)) if missed else state


def _would_share(state: VerifyState, running: Pass, message: Segment) -> bool:
    """Whether a pass would have taken in a segment, had it been here: stages before this one have
    computed it together with what runs. From a draft node it would have to be chosen earlier."""
    name = message.session
    first = next((part.segment for part in running.parts if part.segment.session == name), None)
    if first is None or not takes_more(state.sessions[name], first) or not state.cost.sizes:
        return False
    return batch_cost(state).joins(len(running.parts), running.job.row_count, len(message.ids))


def batch_cost(state: VerifyState) -> BatchCost:
    """What passes and the link onward have been measured to cost; at least one pass has ended."""
    return BatchCost(interpolate(*state.cost.averages()), state.onward_row_seconds)


def return_credit(state: VerifyState, started: Iterable[SessionId]) -> tuple[VerifyState, Effects]:
    """The credit of segments that have left the queue for a pass with the sessions ``started``.
    A link whose queue is still full loses a segment of its extra credit."""
    for peer in set(map(state.config.upstream_of, started)):
        credit = state.inbound[peer]
        if credit.extra and queued(state, peer) >= queue_limit(state, peer):
            state = state.with_credit(peer, replace(credit, extra=credit.extra - 1))
    return grant(state)


def release_dead(state: VerifyState) -> tuple[VerifyState, Effects]:
    """After a prune or the end of sessions: abandon a running pass all of whose rows are dead, and
    drop dead rows that wait. An empty segment's place goes back as credit."""
    running = state.running
    effects: Effects = ()
    if running is not None and not running.abandoned:
        parts = [(state.sessions.get(p.segment.session), p.segment.ids) for p in running.parts]
        if not any(one is not None and survivors(one, ids) for one, ids in parts):
            state = replace(state, running=replace(running, abandoned=True))
            effects = (Abandon(running.job),)
    if not state.queue and not state.outbox:
        return state, effects
    queue, outbox = _live(state, state.queue), _live(state, state.outbox)
    state, granted = grant(replace(state, queue=queue, outbox=outbox))
    return state, effects + granted


def _live(state: VerifyState, segments: Iterable[QueuedSegment]) -> tuple[QueuedSegment, ...]:
    sessions = state.sessions
    live = (drop_dead_rows(sessions[s.session], s) for s in segments if s.session in sessions)
    return tuple(filter(None, live))


def with_link_cost(state: VerifyState, message: Segment, seconds: float) -> VerifyState:
    """The inbound link takes ``seconds`` for a segment's tensor; 0: not known."""
    return replace(state, row_seconds=seconds / max(1, len(message.ids))) if seconds else state


def report_costs(state: VerifyState) -> tuple[VerifyState, Effects]:
    """Report to the draft nodes what passes and the inbound link take, where it has changed."""
    if not state.drafts or not state.cost.sizes:
        return state, ()
    changed, reported = state.cost.report(), state.reported_row_seconds
    change = abs(state.row_seconds - reported)
    least = PARAMETERS.min_link_share * min(state.cost.averages()[1])
    if changed is None and (change <= PARAMETERS.report_change * reported or change <= least):
        return state, ()
    cost = changed or state.cost
    state = replace(state, cost=cost, reported_row_seconds=state.row_seconds)
    # A slow link is reported at once, with what is known of passes: segments queue before it.
    table = cost.table() if cost.reported else cost.averages()
    contention = cost.reported_contention if cost.reported else cost.contention
    jitter = cost.deviation.relative
    chunk_rows = max(state.config.tried_rows, default=0)
    times = PassTimes(state.config.rank, *table, state.row_seconds, jitter, contention, chunk_rows)
    return state, tuple([Send(draft, times) for draft in state.drafts])
