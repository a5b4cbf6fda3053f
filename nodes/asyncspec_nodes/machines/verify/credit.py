"""Credit for those that send segments here: as much as fills the link, and no more.

Segments that may wait here are those of ``window`` passes: with many sessions a pass takes many
segments. A link with latency holds segments too (bandwidth-delay product), and so does the way of
the credit back. How many is found out, not set: a segment that had to wait for credit and finds
this stage idle says that there was too little, a queue that is still full when a pass starts that
there was too much. Every link has its own account, so one draft node cannot take another's places.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from asyncspec.actor.machine import Send
from asyncspec_nodes.machines.verify.state import Effects, Inflow, VerifyState
from asyncspec_protocol.ids import Rank, SessionId
from asyncspec_protocol.messages import Credit, Segment


def queued(state: VerifyState, peer: Rank) -> int:
    """Segments from a peer that wait here."""
    if len(state.inflows) == 1:
        return len(state.queue)
    way = state.config.way_of
    return sum([way(waiting.session) == peer for waiting in state.queue])


def room(state: VerifyState, peer: Rank) -> int:
    """Segments from a peer that may wait here: so many passes of as many as it has sessions, and
    fit."""
    sessions = len(state.sessions)
    if len(state.inflows) > 1:
        way = state.config.way_of
        sessions = sum([way(session) == peer for session in state.sessions])
    return state.config.window * max(1, min(state.fit, sessions))


def grant(state: VerifyState, peers: Iterable[Rank] | None = None) -> tuple[VerifyState, Effects]:
    """Give ``peers``, else all that feed this stage, what credit there is: for what has left the
    queue, and for what there is more room for than before. What was given is never taken back."""
    effects: list[Send] = []
    for peer in state.inflows if peers is None else peers:
        inflow, places = state.inflows[peer], room(state, peer)
        limit = inflow.received - queued(state, peer) + places + inflow.longer
        if limit > inflow.granted:
            state = put(state, peer, replace(inflow, granted=limit))
            effects.append(Send(peer, Credit(limit, places, state.row_seconds)))
    return state, tuple(effects)


def put(state: VerifyState, peer: Rank, inflow: Inflow) -> VerifyState:
    """The state with a link's account as it is now."""
    return replace(state, inflows={**state.inflows, peer: inflow})


def lengthen(state: VerifyState, peer: Rank, message: Segment) -> VerifyState:
    """One segment more for a link that has let this stage run dry. Asked when ``message`` has come
    and before it is queued."""
    inflow = state.inflows[peer]
    dry = state.running is None and not state.queue and not state.parked
    most = state.config.most_window - state.config.window
    if not (message.waited and dry) or inflow.longer >= most:
        return state
    return put(state, peer, replace(inflow, longer=inflow.longer + 1))


def give_back(state: VerifyState, started: Iterable[SessionId]) -> tuple[VerifyState, Effects]:
    """The credit of segments that have left the queue for their pass, which ``started`` are in,
    unless enough wait behind."""
    for peer in set(map(state.config.way_of, started)):
        inflow = state.inflows[peer]
        if inflow.longer and queued(state, peer) >= room(state, peer):
            state = put(state, peer, replace(inflow, longer=inflow.longer - 1))
    return grant(state)
