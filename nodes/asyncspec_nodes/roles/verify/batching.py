"""The next pass: which queued segments share it (dynamic batching, SpecPipe 4.4), and its start.

One segment of each session goes first, in the order of arrival, decoding before prompts: a user
waits for every token of an answer, and once for a prompt. A segment passed over too often goes
before all others. Where rows cost, a pass has at most its fair share of them. Then more segments of
its sessions join it where passes are measured to cost little more: on the plateau a segment gains
nothing by a pass of its own. For sessions that are about to come back it may wait (pass_sharing).

The next pass is planned while another one runs, and anew whenever something changes, so that the
device starts it without a round trip to the machine. A plan changes no other state until its pass
starts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import is_

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.cost_model.passes import interpolate
from asyncspec.core.cost_model.rows import BatchCost
from asyncspec.core.jobs import Batch
from asyncspec.core.machine import Compute, Effects, RunNext, Send, SetTimer
from asyncspec_nodes.roles.verify.flow_control import batch_cost, return_credit
from asyncspec_nodes.roles.verify.pass_sharing import SHARE_DEADLINE, share_deadline, wait_until
from asyncspec_nodes.roles.verify.planning import pass_started
from asyncspec_nodes.roles.verify.session import (
    NextPass,
    Pass,
    PassPart,
    QueuedSegment,
    StageSession,
    VerifyState,
    applied,
    is_prefill,
    plan_part,
    survivors,
    takes_more,
)
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Segment

Queue = tuple[QueuedSegment, ...]

MAX_AHEAD = 2**21
"""Slots that the rows of a segment may see at most, beside the committed path, in a plan that is
made anew after every message: some ten milliseconds. No segment of a usual tree has so many."""


class FairShare(Struct, frozen=True):
    """Rows of a pass that sessions should share."""

    rows: int
    # Their rows do not count: a plan decides when they go.
    exempt: Collection[SessionId] = ()


def select_batch(
    queue: Queue,
    sessions: Mapping[SessionId, StageSession],
    max_rows: int,
    held: Collection[SessionId] = (),
    costs: BatchCost | None = None,
    share: FairShare | None = None,
) -> tuple[Queue, Queue]:
    """The segments of the next pass, and the queue without them. Only a single segment may have
    more than ``max_rows`` rows. ``held``: sessions that wait for a batch; not all of the queue.
    Without ``costs`` nothing joins and shares do not count."""
    if len(queue) == 1:
        return queue, ()
    heads: dict[SessionId, int] = {}
    for i, segment in enumerate(queue):
        if segment.session not in held:
            heads.setdefault(segment.session, i)
    in_order = [i for _, i in sorted((_priority(queue[i], sessions), i) for i in heads.values())]
    taken = _first_segments(queue, sessions, in_order, max_rows, costs, share)
    if costs is not None and len(taken) < len(queue):
        taken |= _joining(queue, sessions, taken, max_rows, costs)
    left = [
        replace(s, passed_over=s.passed_over + 1) if heads.get(s.session) == i else s
        for i, s in enumerate(queue)
        if i not in taken
    ]
    return tuple([queue[i] for i in sorted(taken)]), tuple(left)


def _first_segments(
    queue: Queue,
    sessions: Mapping[SessionId, StageSession],
    heads: Sequence[int],
    max_rows: int,
    costs: BatchCost | None,
    share: FairShare | None,
) -> set[int]:
    """First segments, in this order, that share a pass. Prefill chunks may exceed the share."""
    taken: set[int] = set()
    rows = shared = 0
    for i in heads:
        segment, more = queue[i], len(queue[i].ids)
        if taken and rows + more > max_rows:
            continue
        counts = share is not None and segment.session not in share.exempt
        if share is not None and counts and shared and costs is not None:
            over = shared + more > share.rows and not is_prefill(segment, sessions[segment.session])
            if over and not costs.is_cheap(len(taken), rows, more, PARAMETERS.oversize_delay):
                continue
        taken.add(i)
        rows += more
        shared += more if counts else 0
    return taken


def _joining(
    queue: Queue,
    sessions: Mapping[SessionId, StageSession],
    heads: Collection[int],
    max_rows: int,
    costs: BatchCost,
) -> set[int]:
    """Further segments of the sessions in a pass, without a gap."""
    joining: set[int] = set()
    first = [queue[i] for i in heads]
    open_to = {head.session for head in first if takes_more(sessions[head.session], head)}
    rows = sum([len(queue[i].ids) for i in heads])
    for i, segment in enumerate(queue):
        if segment.session not in open_to or i in heads:
            continue
        more, segments = len(segment.ids), len(heads) + len(joining)
        if rows + more <= max_rows and costs.joins(segments, rows, more):
            joining.add(i)
            rows += more
        else:
            open_to.discard(segment.session)
    return joining


def _priority(segment: QueuedSegment, sessions: Mapping[SessionId, StageSession]) -> int:
    """Smaller goes first; of equals, the older segment."""
    if segment.passed_over >= PARAMETERS.max_skips:
        return 0
    return 2 if is_prefill(segment, sessions[segment.session]) else 1


def fair_share(state: VerifyState) -> FairShare | None:
    """The fair share of the first stage's next pass; later stages take what the first has made.

    Sessions that share a pass come back and are sent together: nothing parts them again, and where
    rows cost, a few long passes would go round and most stages stand idle. So the share is an even
    part, among the stages, of the rows that wait or are under way; or half of the rows that could
    go now, if these are more. Sessions that may be planned for are exempt.
    """
    config, exempt = state.config, state.schedule.members
    if config.rank != 1:
        return None
    sessions = {name: session for name, session in state.sessions.items() if name not in exempt}
    rows, first = 0, dict[SessionId, int]()
    for segment in state.queue:
        name = segment.session
        if name in sessions and not is_prefill(segment, sessions[name]):
            rows += len(segment.ids)
            first.setdefault(name, len(segment.ids))
    for name, session in sessions.items():
        speculative = len(session.slots.speculative)
        # Plain decoding has one row under way that is no node of the tree any more.
        decoding = session.slots.committed >= session.liveness.prompt_length
        rows += speculative if name in first else speculative or int(decoding)
    even = -(-rows // config.stages)
    return FairShare(max(even, -(-sum(first.values()) // 2)), exempt.keys())


def plan_next(state: VerifyState) -> NextPass | None:
    """The pass that starts as soon as the device is free, as things are; None where none can."""
    config, queue, running = state.config, state.queue, state.running
    if not queue or _blocked(state):
        return None
    held = _held(state)
    if all(segment.session in held for segment in queue):
        return None
    costs = share = None
    if len(queue) > 1 and state.cost.sizes:
        costs = batch_cost(state)
        share = fair_share(state)
    chosen, left = select_batch(queue, state.sessions, config.batch_rows, held, costs, share)
    sessions = {segment.session: state.sessions[segment.session] for segment in chosen}
    if running is not None and not running.abandoned:
        for name, session in sessions.items():
            finished = session.finished_passes + running.has(name)
            sessions[name] = replace(session, finished_passes=finished)
    parts: list[PassPart] = []
    for segment in chosen:
        name = segment.session
        sessions[name], part = plan_part(sessions[name], segment, config)
        parts.append(part)
    job = parts[0].job if len(parts) == 1 else Batch(tuple([part.job for part in parts]))
    slots = {name: session.slots for name, session in sessions.items()}
    return NextPass(Pass(tuple(parts), job), left, slots)


def _held(state: VerifyState) -> Collection[SessionId]:
    """Waiting sessions of links some of whose announced segments are still to come, as they belong
    in one pass; those whose batch is not the current one or not complete; and those without room.
    """
    schedule, crowded = state.schedule, _crowded(state)
    late = [peer for peer, credit in state.inbound.items() if credit.expected]
    if not late and not schedule.batches:
        return crowded
    upstream_of = state.config.upstream_of
    here = {segment.session for segment in state.queue}
    return crowded.union(name for name in here if upstream_of(name) in late).union(
        schedule.held(here)
    )


def _crowded(state: VerifyState) -> set[SessionId]:
    """Sessions without room for what waits until prunes are here that earlier stages have applied:
    they come over a link of their own, which many rounds may overtake."""
    queue, sessions = state.queue, state.sessions
    late = {one.session for one in queue if one.applied > sessions[one.session].liveness.version}

    def wanted(name: SessionId) -> int:
        waiting = [len(segment.ids) for segment in queue if segment.session == name]
        return sessions[name].slots.used + sum(waiting)

    return {name for name in late if wanted(name) > sessions[name].max_slots}


def _blocked(state: VerifyState) -> bool:
    """Whether the next stage has no credit for what is computed or running."""
    if state.config.last:
        return False
    onward = len(state.outbox)
    for part in state.running.parts if state.running is not None else ():
        session = state.sessions.get(part.segment.session)
        onward += session is not None and bool(survivors(session, part.segment.ids))
    return onward > max(0, state.allowed - state.sent)


def schedule(state: VerifyState, now: float) -> tuple[VerifyState, Effects]:
    """After every input: send what is computed, start the next pass, announce its successor."""
    effects: Effects = ()
    if state.outbox:
        state, effects = send_computed(state, now)
    if state.running is None and (state.next_pass or (state.queue and not state.outbox)):
        state, started = _start(state, now)
        effects += started
    state, announced = _look_ahead(state, now)
    return state, effects + announced


def send_computed(
    state: VerifyState, now: float, *, waited: bool = False
) -> tuple[VerifyState, Effects]:
    """Send computed segments to the next stage, as far as there is credit."""
    ready = state.outbox[: max(0, state.allowed - state.sent)]
    if not ready:
        return state, ()
    state = replace(state, outbox=state.outbox[len(ready) :], sent=state.sent + len(ready))
    effects: list[Send] = []
    for number, segment in enumerate(ready, 1):
        session = state.sessions[segment.session]
        message = Segment(
            session=segment.session,
            segment=segment.segment,
            applied=applied(session, segment),
            ids=segment.ids,
            parents=segment.parents,
            tokens=segment.tokens,
            aux_states=session.aux_states(state.config.end_layer),
            waited=waited,
            batch_remaining=len(ready) - number,
            stage_seconds=segment.stage_seconds(now),
            pass_number=segment.pass_number,
            scored_tokens=segment.scored_tokens,
        )
        effects.append(Send(state.config.next_rank, message, segment.hidden))
    return state, tuple(effects)


def _start(state: VerifyState, now: float) -> tuple[VerifyState, Effects]:
    """Start the next pass, and return the credit of its segments."""
    next_pass = state.next_pass or plan_next(state)
    if next_pass is None:
        return state, ()
    if state.next_pass is None and (until := share_deadline(state, next_pass, now)) is not None:
        return wait_until(state, until, now)
    unset: Effects = () if state.waiting is None else (SetTimer(SHARE_DEADLINE, None),)
    parts, job = next_pass.planned.parts, next_pass.planned.job
    slots = next_pass.slots.items()
    changed = {name: replace(state.sessions[name], slots=table) for name, table in slots}
    state = replace(
        state,
        queue=next_pass.queue,
        running=replace(next_pass.planned, started=now),
        next_pass=None,
        waiting=None,
        sessions={**state.sessions, **changed},
        segments_per_pass=max(
            1, state.config.batch_rows // max([len(part.job.rows) for part in parts])
        ),
    )
    started = [part.segment.session for part in parts]
    state, granted = return_credit(state, started)
    state, armed = pass_started(state, started, now) if state.schedule.batches else (state, ())
    return state, (Compute(job), *granted, *armed, *unset)


def _look_ahead(state: VerifyState, now: float) -> tuple[VerifyState, Effects]:
    """Tell the device which pass follows the running one, where that has changed."""
    running = state.running
    if running is None:
        return (replace(state, planned_from=()) if state.planned_from else state), ()
    # Without measured passes it is not known which segments share the next one.
    if not (state.queue or state.next_pass) or not state.cost.sizes:
        return state, ()
    basis = _basis(state)
    if state.planned_from and all(map(is_, basis, state.planned_from)):
        return state, ()
    previous, next_pass = state.next_pass, None if _is_large(state) else plan_next(state)
    if next_pass is not None:
        end = running.started + interpolate(*state.cost.averages())(running.job.row_count)
        if share_deadline(state, next_pass, max(now, end)) is not None:
            next_pass = None
    state = replace(state, next_pass=next_pass, planned_from=basis)
    if next_pass is None:
        return state, () if previous is None else (RunNext(running.job, None),)
    return state, (RunNext(running.job, next_pass.planned.job),)


def _is_large(state: VerifyState) -> bool:
    """Whether a segment that waits has more slots to see than are planned ahead. What several share
    has few rows."""
    for segment in state.queue:
        rows, cached = len(segment.ids), state.sessions[segment.session].slots.speculative
        if rows * (rows + len(cached)) > MAX_AHEAD:
            return True
    return False


def _basis(state: VerifyState) -> tuple[object, ...]:
    """What a plan is made from, except pass times: a new average makes no better plan."""
    return (
        state.running,
        state.queue,
        state.sessions,
        state.inbound,
        state.schedule,
        state.allowed,
        state.sent,
        state.onward_row_seconds,
    )
