"""The credit of the stage before: as much as fills the link, and no more.

Segments that may wait here are those of ``window`` passes: with many sessions a pass takes many
segments. A link with latency holds segments too (bandwidth-delay product), and so does the way of
the credit back. How many is found out, not set: a segment that had to wait for credit and finds
this stage idle says that there was too little, a queue that is still full when a pass starts that
there was too much.
"""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec.actor.machine import Send
from asyncspec_nodes.machines.verify.state import Effects, VerifyState
from asyncspec_protocol.messages import Credit, Segment


def room(state: VerifyState) -> int:
    """Segments that may wait here: so many passes of as many as there are sessions, and fit."""
    return state.config.window * max(1, min(state.fit, len(state.sessions)))


def grant(state: VerifyState) -> tuple[VerifyState, Effects]:
    """Give the stage before what credit there is: for what has left the queue, and for what there
    is more room for than before. What was given is never taken back."""
    places = room(state)
    limit = state.received - len(state.queue) + places + state.longer
    if limit <= state.granted or state.config.before not in state.peers:
        return state, ()
    state = replace(state, granted=limit)
    return state, (Send(state.config.before, Credit(limit=limit, room=places)),)


def lengthen(state: VerifyState, message: Segment) -> VerifyState:
    """One segment more for a link that has let this stage run dry. Asked when ``message`` has come
    and before it is queued."""
    dry = state.running is None and not state.queue and not state.parked
    most = state.config.most_window - state.config.window
    if not (message.waited and dry) or state.longer >= most:
        return state
    return replace(state, longer=state.longer + 1)


def give_back(state: VerifyState) -> tuple[VerifyState, Effects]:
    """The credit of segments that have left the queue for their pass, unless enough wait behind."""
    if state.longer and len(state.queue) >= room(state):
        state = replace(state, longer=state.longer - 1)
    return grant(state)
