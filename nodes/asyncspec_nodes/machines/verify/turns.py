"""How a plan is followed: turns, deadlines, and what members' segments bring."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from asyncspec.actor.machine import Arm
from asyncspec_nodes.machines.verify.comparing import count
from asyncspec_nodes.machines.verify.rota import LEAST, ROTA, Rota, came, late, passed
from asyncspec_nodes.machines.verify.state import Effects, VerifyState
from asyncspec_protocol.ids import SessionId


def arrived(state: VerifyState, session: SessionId, now: float) -> VerifyState:
    """A segment has come."""
    rota = came(state.rota, session, now) if state.rota.offences else state.rota
    if session in rota.members:
        rota = count(rota, session, state.sessions[session].slots.committed, now)
    return state if rota is state.rota else replace(state, rota=rota)


def taken(
    state: VerifyState, chosen: Sequence[SessionId], now: float
) -> tuple[VerifyState, Effects]:
    """A pass of some sessions starts. Where not all of the current batch fit, it has the next one
    too, and its time anew."""
    rota = state.rota
    part = set(rota.current).intersection(chosen)
    if not part:
        return state, ()
    had = rota.had | part
    here = {waiting.session for waiting in state.queue}
    left = any(s in here and s not in had for s in rota.current)
    rota = replace(rota, had=had) if left else passed(rota, now)
    return replace(state, rota=rota), (deadline(rota, now),)


def fired(state: VerifyState, now: float) -> tuple[VerifyState, Effects]:
    """The current batch has had its time: who is not here is not waited for any more. Who is, waits
    for the device alone; but that may change, and nobody is held without a deadline."""
    rota = state.rota
    here = {waiting.session for waiting in state.queue} | rota.had
    absent = [session for session in rota.current if session not in here]
    rota = late(rota, absent, now) if absent else rota
    return replace(state, rota=rota), (deadline(rota, now),)


def deadline(rota: Rota, now: float) -> Arm:
    """Of the batch whose turn it is from now on."""
    if not rota.batches:
        return Arm(ROTA, None)
    return Arm(ROTA, max(rota.deadline_from, now + LEAST * rota.period))
