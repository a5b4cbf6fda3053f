"""Forward passes begin: the next one, as soon as there is room for what it brings."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from asyncspec.actor.machine import Compute, Send
from asyncspec.jobs import Batch
from asyncspec_nodes.machines.verify.batch import Costs, gather
from asyncspec_nodes.machines.verify.credit import give_back
from asyncspec_nodes.machines.verify.session import (
    Part,
    Running,
    Waiting,
    applied,
    plan,
    taps,
)
from asyncspec_nodes.machines.verify.state import Effects, VerifyState
from asyncspec_nodes.machines.verify.turns import taken
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Segment


def _held(state: VerifyState) -> Collection[SessionId]:
    """Waiting sessions some of whose link's segments are still to come: these belong in one pass.
    Nobody but they waits for them. And those whose batch has not its turn, or is not complete."""
    rota, late = state.rota, [peer for peer, inflow in state.inflows.items() if inflow.expected]
    if not late and not rota.batches:
        return ()
    way = state.config.way_of
    here = {waiting.session for waiting in state.queue}
    return {session for session in here if way(session) in late}.union(rota.held(here))


def serve(state: VerifyState, now: float) -> tuple[VerifyState, Effects]:
    """Send what is parked and start the next pass, where that is possible now."""
    effects: Effects = ()
    if state.parked:
        state, effects = send_parked(state, now)
    if state.parked or state.running is not None or not state.queue:
        return state, effects
    held = _held(state)
    if held and all(waiting.session in held for waiting in state.queue):
        return state, effects
    state, started = _start(state, held, now)
    return state, effects + started


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


def _start(
    state: VerifyState, held: Collection[SessionId], now: float
) -> tuple[VerifyState, Effects]:
    """The first of the queue get their pass, and their places go back to the stage before."""
    config, sessions = state.config, dict(state.sessions)
    alone = len(state.queue) == 1 or not state.cost.sizes
    costs = None if alone else Costs(*state.cost.averages(), state.onward_row_seconds)
    chosen, queue = gather(state.queue, sessions, config.batch_rows, held, costs)
    parts: list[Part] = []
    for waiting in chosen:
        session = sessions[waiting.session]
        sessions[waiting.session], part = plan(
            session, waiting, first=config.rank == 1, last=config.last
        )
        parts.append(part)
    job = parts[0].job if len(parts) == 1 else Batch(tuple([part.job for part in parts]))
    running = Running(parts=tuple(parts), job=job)
    largest = max([len(part.job.rows) for part in parts])
    state = replace(
        state,
        queue=queue,
        running=running,
        sessions=sessions,
        fit=max(1, config.batch_rows // largest),
    )
    started = [waiting.session for waiting in chosen]
    state, granted = give_back(state, started)
    state, armed = taken(state, started, now) if state.rota.batches else (state, ())
    return state, (Compute(job), *granted, *armed)


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
        more=more,
        spent=waiting.spent_by(now),
        turn=waiting.turn,
    )
    return Send(state.config.after, message, waiting.hidden)
