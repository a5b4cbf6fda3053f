"""Prunes: what waits loses its dead rows at once; a pass on nothing but dead rows is given up."""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec.actor.machine import Abandon, Compute
from asyncspec_nodes.machines.verify.credit import grant
from asyncspec_nodes.machines.verify.follows import astray
from asyncspec_nodes.machines.verify.session import Waiting, prune, survivors, thin
from asyncspec_nodes.machines.verify.state import Effects, VerifyState, check_known
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import owner
from asyncspec_protocol.messages import PruneIndices


def pruned(state: VerifyState, message: PruneIndices, now: float) -> tuple[VerifyState, Effects]:
    """Apply a prune to all there is of its session, at once. Raises ``RemoteProtocolError`` for one
    that takes a waiting node's parent away and leaves the node."""
    session = state.sessions.get(message.session)
    if session is None:
        check_known(state, message.session, owner(message.session))
        return state, ()
    session, job = prune(session, message)
    state = replace(state, sessions={**state.sessions, message.session: session})
    if state.config.rank == 1 and session.coalesce:
        state = replace(state, awaited=state.awaited.moved(message.session, now))
    effects: Effects = () if job is None else (Compute(job),)
    state, abandoned = abandon_dead(state)
    state, granted = thin_queue(state)
    left = [waiting for waiting in state.queue if waiting.session == message.session]
    if left and (wrong := astray(session, (), left)):
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
