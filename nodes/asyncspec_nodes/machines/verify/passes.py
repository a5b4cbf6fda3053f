"""Forward passes begin: the next one, as soon as there is room for what it brings."""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec.actor.machine import Arm, Compute, Send
from asyncspec_nodes.machines.verify.awaited import TREE
from asyncspec_nodes.machines.verify.credit import give_back
from asyncspec_nodes.machines.verify.following import awaits, look_ahead, planned
from asyncspec_nodes.machines.verify.session import Waiting, applied, taps
from asyncspec_nodes.machines.verify.state import Effects, VerifyState
from asyncspec_nodes.machines.verify.turns import taken
from asyncspec_protocol.messages import Segment


def serve(state: VerifyState, now: float) -> tuple[VerifyState, Effects]:
    """Send what is parked, start the next pass where that is possible now, and look for the one
    after it."""
    effects: Effects = ()
    if state.parked:
        state, effects = send_parked(state, now)
    if state.running is None and (state.following or (state.queue and not state.parked)):
        state, started = _start(state, now)
        effects += started
    state, told = look_ahead(state, now)
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
    begun = state.following or planned(state, now)
    if begun is None:
        return _patient(state) if awaits(state, now) else (state, ())
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
    state, granted = give_back(state, started)
    state, armed = taken(state, started, now) if state.rota.batches else (state, ())
    return state, (Compute(begun.running.job), *granted, *armed)


def _patient(state: VerifyState) -> tuple[VerifyState, Effects]:
    """The device stands still for a tree, as long as that has time."""
    if state.awaited.until is not None:
        return state, ()
    awaited = state.awaited.limited()
    return replace(state, awaited=awaited), (Arm(TREE, awaited.until),)


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
