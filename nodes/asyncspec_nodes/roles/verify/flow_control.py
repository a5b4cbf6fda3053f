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

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.machine import Abandon, Compute, Send
from asyncspec_nodes.roles.verify.session import Waiting, orphan_error, prune, survivors, thin
from asyncspec_nodes.roles.verify.state import Effects, Inflow, VerifyState, check_was_opened
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import Rank, SessionId, owner
from asyncspec_protocol.messages import Credit, PassTimes, PruneIndices, Segment


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


def return_credit(state: VerifyState, started: Iterable[SessionId]) -> tuple[VerifyState, Effects]:
    """The credit of segments that have left the queue for their pass, which ``started`` are in,
    unless enough wait behind."""
    for peer in set(map(state.config.way_of, started)):
        inflow = state.inflows[peer]
        if inflow.longer and queued(state, peer) >= room(state, peer):
            state = put(state, peer, replace(inflow, longer=inflow.longer - 1))
    return grant(state)


# --- Draft nodes are told what passes and the line take.


def tell_costs(state: VerifyState) -> tuple[VerifyState, Effects]:
    """What the draft nodes do not know yet, if there is any."""
    if not state.drafts or not state.cost.sizes:
        return state, ()
    news = state.cost.report()
    if news is None and not _line_changed(state):
        return state, ()
    cost = news or state.cost
    state = replace(state, cost=cost, row_seconds_told=state.row_seconds)
    # A slow line is told of at once, with what is known of passes: segments queue before it.
    table = cost.table() if cost.reported else cost.averages()
    times = PassTimes(state.config.rank, *table, state.row_seconds, cost.deviation.relative)
    return state, tuple([Send(draft, times) for draft in state.drafts])


def _line_changed(state: VerifyState) -> bool:
    """Whether draft nodes should hear of the line now."""
    told = state.row_seconds_told
    change = abs(state.row_seconds - told)
    least = PARAMETERS.min_link_share * min(state.cost.averages()[1])
    return change > PARAMETERS.report_change * told and change > least


# --- Prunes: what waits loses its dead rows at once; a pass on nothing but dead rows is given up.


def pruned(state: VerifyState, message: PruneIndices) -> tuple[VerifyState, Effects]:
    """Apply a prune to all there is of its session, at once. Raises ``RemoteProtocolError`` for one
    that takes a waiting node's parent away and leaves the node."""
    session = state.sessions.get(message.session)
    if session is None:
        check_was_opened(state, message.session, owner(message.session))
        return state, ()
    session, job = prune(session, message)
    state = replace(state, sessions={**state.sessions, message.session: session})
    effects: Effects = () if job is None else (Compute(job),)
    state, abandoned = abandon_dead(state)
    state, granted = thin_queue(state)
    left = [waiting for waiting in state.queue if waiting.session == message.session]
    if left and (wrong := orphan_error(session, (), left)):
        raise RemoteProtocolError(wrong, peer=owner(message.session))
    return state, abandoned + effects + granted


def abandon_dead(state: VerifyState) -> tuple[VerifyState, Effects]:
    """A pass all of whose rows are dead only keeps the device from what is alive."""
    running = state.running
    if running is None or running.abandoned:
        return state, ()
    for waiting in (part.waiting for part in running.parts):
        session = state.sessions.get(waiting.session)
        if session is not None and survivors(session, waiting.ids):
            return state, ()
    return replace(state, running=replace(running, abandoned=True)), (Abandon(running.job),)


def thin_queue(state: VerifyState) -> tuple[VerifyState, Effects]:
    """Dead rows leave the queue and what is parked; an emptied segment gives its place back."""
    if not state.queue and not state.parked:
        return state, ()
    queue, parked = _thinned(state, state.queue), _thinned(state, state.parked)
    return grant(replace(state, queue=queue, parked=parked))


def _thinned(state: VerifyState, segments: tuple[Waiting, ...]) -> tuple[Waiting, ...]:
    alive = (thin(state.sessions[w.session], w) for w in segments if w.session in state.sessions)
    return tuple(w for w in alive if w is not None)
