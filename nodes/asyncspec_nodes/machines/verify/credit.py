"""The credit of the stage before: as much as fills the link, and no more.

A link with latency holds segments too (bandwidth-delay product), and so does the way of the credit
back. How many is found out, not set: a segment that had to wait for credit and finds this stage
idle says that there was too little, a queue that is still full when a pass starts that there was
too much.
"""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec.actor.machine import Send
from asyncspec_nodes.machines.verify.state import Effects, VerifyState
from asyncspec_protocol.messages import Credit, Segment


def grant(state: VerifyState, places: int = 1) -> tuple[VerifyState, Effects]:
    """Give the stage before its credit back for segments that have left the queue."""
    if not places or state.config.before not in state.peers:
        return state, ()
    state = replace(state, granted=state.granted + places)
    return state, (Send(state.config.before, Credit(limit=state.granted)),)


def lengthen(state: VerifyState, message: Segment) -> tuple[VerifyState, Effects]:
    """One segment more for a link that has let this stage run dry. Asked when ``message`` has come
    and before it is queued."""
    dry = state.running is None and not state.queue and not state.parked
    most = state.config.most_window - state.config.window
    if not (message.waited and dry) or state.longer >= most:
        return state, ()
    return grant(replace(state, longer=state.longer + 1))


def give_back(state: VerifyState) -> tuple[VerifyState, Effects]:
    """The credit of a segment that has left the queue for its pass, unless enough wait behind."""
    if state.longer and len(state.queue) >= state.config.window:
        return replace(state, longer=state.longer - 1), ()
    return grant(state)
