"""Stages that come and go. A lost one ends sessions, never requests."""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec.actor.machine import Arm, Effect, Send
from asyncspec_nodes.machines.draft import breakers
from asyncspec_nodes.machines.draft.ends import close, finish_if_complete, unserved
from asyncspec_nodes.machines.draft.leaving import freed_below, leave_prompts
from asyncspec_nodes.machines.draft.state import FIRST, REJOIN, DraftState, Effects
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import Rank, SessionId, owner
from asyncspec_protocol.messages import Floor, Ready
from asyncspec_protocol.requests import BREAKS

LEFT = 2**32
"""Sessions that a draft node is to have left, whatever a stage says it has heard of: more than it
ever opens."""


def joined(state: DraftState, peer: Rank) -> tuple[DraftState, Effects]:
    """A node can be reached; the first stage's credit starts anew."""
    state = replace(state, peers=state.peers | {peer})
    if peer == FIRST:
        state = replace(state, allowed=0, sent=0, window=0)
    # A stage says when it is ready; a source is as soon as it is there.
    return complete(state) if peer == state.config.source else (state, ())


def heard(state: DraftState, message: Ready) -> DraftState:
    """A node has said how it is: its slots, and what of earlier sessions is over there. Raises
    ``RemoteProtocolError`` where it has heard of sessions that cannot be this node's."""
    rank, floor = message.rank, message.floor
    echoes = state.echoes
    if rank in echoes and (not message.up or floor >= echoes[rank]):
        echoes = {other: since for other, since in echoes.items() if other != rank}
    state = replace(state, slots={**state.slots, rank: message.slots}, echoes=echoes)
    if floor >= 0 and rank <= state.config.stages:
        state = freed_below(replace(state, telling=state.telling | {rank}), rank, floor)
    return _above(state, message.opened, rank)


def _above(state: DraftState, opened: SessionId, peer: Rank) -> DraftState:
    """The next session is above those of this node that a stage has heard of: they were issued
    before it was started again, by a clock that has been set back since. Raises
    ``RemoteProtocolError`` where they cannot be this node's."""
    if opened < state.next_session:
        return state
    first = SessionId(opened + 1)
    if owner(SessionId(first + LEFT)) != owner(state.config.first_session):
        raise RemoteProtocolError(f"session {opened} is not this draft node's", peer=peer)
    return replace(state, next_session=first)


def complete(state: DraftState) -> tuple[DraftState, Effects]:
    """If the pipeline stands now: what earlier sessions left behind somewhere is void."""
    if not state.up or state.sessions:
        return state, ()
    floor = Floor(first=state.next_session)
    floors = tuple(Send(rank, floor) for rank in sorted(state.peers))
    return state, (*floors, Arm(REJOIN, None))


def lost(state: DraftState, peer: Rank, now: float) -> tuple[DraftState, Effects]:
    """A stage is gone, and with it its accounts and every session."""
    if peer not in state.peers:
        return state, ()
    stood, peers = state.up, state.peers - {peer}
    echoes = {rank: since for rank, since in state.echoes.items() if rank != peer}
    if (before := Rank(peer - 1)) in state.ready:
        echoes[before] = state.next_session
    state = replace(
        state,
        peers=peers,
        ready=state.ready - {peer},
        echoes=echoes,
        expected=0,
    )
    state, down = broken(state, now, stood=stood)
    effects = list(down)
    for key, ending in state.endings.items():
        left = replace(ending, missing=ending.missing - {peer})
        state = replace(state, endings={**state.endings, key: left})
        state, finished = finish_if_complete(state, key)
        effects.extend(finished)
    return state, tuple(effects)


def broken(
    state: DraftState, now: float, *, stood: bool, echo: bool = False
) -> tuple[DraftState, Effects]:
    """The pipeline is broken: sessions end, their requests go back to the head of the backlog, but
    for one that breaks it whenever it is read. If it ``stood`` until now they wait for it from now
    on. ``echo``: of that break it has heard before."""
    effects: list[Effect] = []
    back, ended = breakers.back(state, echo=echo)
    for session in state.sessions.values():
        state, closed = close(state, session)
        effects.extend(closed)
    for job in ended:
        effects += (unserved(job, "error", breakers.why_ended(job), now, BREAKS),)
    state = replace(state, backlog=(*back, *state.backlog))
    state = leave_prompts(state, state.kept)
    if state.backlog and stood:
        effects.append(Arm(REJOIN, now + state.config.rejoin_seconds))
    return state, tuple(effects)
