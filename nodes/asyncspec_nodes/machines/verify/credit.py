"""The credit of the stage before."""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec.actor.machine import Send
from asyncspec_nodes.machines.verify.state import Effects, VerifyState
from asyncspec_protocol.messages import Credit


def grant(state: VerifyState, places: int = 1) -> tuple[VerifyState, Effects]:
    """Give the stage before its credit back for segments that have left the queue."""
    if not places or state.config.before not in state.peers:
        return state, ()
    state = replace(state, granted=state.granted + places)
    return state, (Send(state.config.before, Credit(limit=state.granted)),)
