"""Which pass comes next. It is planned while another is in service, and anew whenever something
changes, so that the device can go on with it by itself: between two passes it waits for nobody.

Nothing of a plan counts before its pass begins. Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from operator import is_

from msgspec.structs import replace

from asyncspec.core.cost_model.passes import interpolate
from asyncspec.core.cost_model.rows import BatchCost
from asyncspec.core.jobs import Batch
from asyncspec.core.machine import Compute, RunNext, Send
from asyncspec_nodes.roles.verify.batching import fair_share, gather
from asyncspec_nodes.roles.verify.flow_control import return_credit
from asyncspec_nodes.roles.verify.planning import pass_started
from asyncspec_nodes.roles.verify.session import (
    Part,
    Running,
    Waiting,
    applied,
    plan,
    survivors,
    taps,
)
from asyncspec_nodes.roles.verify.state import Effects, Following, VerifyState
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Segment


def look_ahead(state: VerifyState) -> tuple[VerifyState, Effects]:
    """Tell the device what follows the pass in service, where that is not what it was told last."""
    running = state.running
    if running is None:
        return (replace(state, planned_from=()) if state.planned_from else state), ()
    # What the first pass of all takes says which segments share the next.
    if not (state.queue or state.following) or not state.cost.sizes:
        return state, ()
    basis = _basis(state)
    if len(basis) == len(state.planned_from) and all(map(is_, basis, state.planned_from)):
        return state, ()
    known, following = state.following, planned(state)
    state = replace(state, following=following, planned_from=basis)
    if following is None:
        return state, () if known is None else (RunNext(running.job, None),)
    return state, (RunNext(running.job, following.running.job),)


def planned(state: VerifyState) -> Following | None:
    """The pass that begins as soon as the device is free, as things stand; None where none can."""
    config, queue = state.config, state.queue
    if not queue or _crowded(state):
        return None
    held = _held(state)
    if all(waiting.session in held for waiting in queue):
        return None
    costs = fair = None
    if len(queue) > 1 and state.cost.sizes:
        costs = BatchCost(interpolate(*state.cost.averages()), state.onward_row_seconds)
        fair = fair_share(state)
    chosen, left = gather(queue, state.sessions, config.batch_rows, held, costs, fair)
    sessions = {waiting.session: state.sessions[waiting.session] for waiting in chosen}
    if state.running is not None:
        for name in sessions:
            if state.running.counts_for(name):
                sessions[name] = replace(sessions[name], turns=sessions[name].turns + 1)
    parts: list[Part] = []
    for waiting in chosen:
        sessions[waiting.session], part = plan(
            sessions[waiting.session], waiting, first=config.rank == 1, last=config.last
        )
        parts.append(part)
    job = parts[0].job if len(parts) == 1 else Batch(tuple([part.job for part in parts]))
    slots = {name: session.slots for name, session in sessions.items()}
    return Following(Running(tuple(parts), job), left, slots)


def _basis(state: VerifyState) -> tuple[object, ...]:
    """All that a plan is made of, but what passes take: a new average makes no better plan."""
    return (
        state.running,
        state.queue,
        state.sessions,
        state.inflows,
        state.schedule,
        state.allowed,
        state.sent,
        state.onward_row_seconds,
    )


def _held(state: VerifyState) -> Collection[SessionId]:
    """Waiting sessions some of whose link's segments are still to come: these belong in one pass.
    Nobody but they waits for them. And those whose batch has not its turn, or is not complete."""
    schedule = state.schedule
    late = [peer for peer, inflow in state.inflows.items() if inflow.expected]
    if not late and not schedule.batches:
        return ()
    way = state.config.way_of
    here = {waiting.session for waiting in state.queue}
    return {session for session in here if way(session) in late}.union(schedule.held(here))


def _crowded(state: VerifyState) -> bool:
    """Whether something that is computed, or is about to be, has to wait for the next stage."""
    if state.config.last:
        return False
    onward = len(state.parked)
    for part in state.running.parts if state.running is not None else ():
        session = state.sessions.get(part.waiting.session)
        onward += session is not None and bool(survivors(session, part.waiting.ids))
    return onward > max(0, state.allowed - state.sent)


# --- Forward passes begin: the next one, as soon as there is room for what it brings.


def serve(state: VerifyState, now: float) -> tuple[VerifyState, Effects]:
    """Send what is parked, start the next pass where that is possible now, and look for the one
    after it."""
    effects: Effects = ()
    if state.parked:
        state, effects = send_parked(state, now)
    if state.running is None and (state.following or (state.queue and not state.parked)):
        state, started = _start(state, now)
        effects += started
    state, told = look_ahead(state)
    return state, effects + told


def send_parked(
    state: VerifyState, now: float, *, waited: bool = False
) -> tuple[VerifyState, Effects]:
    """Send what is computed, as far as there is credit."""
    go = state.parked[: max(0, state.allowed - state.sent)]
    if not go:
        return state, ()
    state = replace(state, parked=state.parked[len(go) :], sent=state.sent + len(go))
    last = len(go) - 1
    return state, tuple(
        [_onward(state, w, now, waited=waited, more=last - i) for i, w in enumerate(go)]
    )


def _start(state: VerifyState, now: float) -> tuple[VerifyState, Effects]:
    """A pass begins, and the places of its segments go back to the stage before. What was said to
    follow has begun by itself."""
    begun = state.following or planned(state)
    if begun is None:
        return state, ()
    parts, most = begun.running.parts, state.config.batch_rows
    seated = {
        name: replace(state.sessions[name], slots=slots) for name, slots in begun.slots.items()
    }
    state = replace(
        state,
        queue=begun.queue,
        running=replace(begun.running, since=now),
        following=None,
        sessions={**state.sessions, **seated},
        fit=max(1, most // max([len(part.job.rows) for part in parts])),
    )
    started = [part.waiting.session for part in parts]
    state, granted = return_credit(state, started)
    state, armed = pass_started(state, started, now) if state.schedule.batches else (state, ())
    return state, (Compute(begun.running.job), *granted, *armed)


def _onward(state: VerifyState, waiting: Waiting, now: float, *, waited: bool, more: int) -> Send:
    session = state.sessions[waiting.session]
    message = Segment(
        session=waiting.session,
        segment=waiting.segment,
        applied=applied(session, waiting),
        ids=waiting.ids,
        parents=waiting.parents,
        tokens=waiting.tokens,
        taps=taps(session, state.config.end_layer),
        waited=waited,
        batch_remaining=more,
        stage_seconds=waiting.spent_by(now),
        pass_number=waiting.turn,
    )
    return Send(state.config.after, message, waiting.hidden)
