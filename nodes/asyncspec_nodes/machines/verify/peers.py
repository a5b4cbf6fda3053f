"""Neighbours and the draft node come and go."""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec.actor.machine import Compute, Effect, Send
from asyncspec.jobs import Release
from asyncspec.pass_cost import PassCost
from asyncspec_nodes.machines.verify.credit import grant
from asyncspec_nodes.machines.verify.prunes import abandon_dead
from asyncspec_nodes.machines.verify.state import Effects, VerifyState
from asyncspec_protocol.ids import DRAFT, Rank
from asyncspec_protocol.messages import Ready


def joined(state: VerifyState, peer: Rank) -> tuple[VerifyState, Effects]:
    """A link is up: credit starts anew on it."""
    config = state.config
    state = replace(state, peers=state.peers | {peer})
    effects: list[Effect] = []
    if peer == config.before:
        state, granted = grant(replace(state, granted=0, received=0, longer=0, expected=0))
        effects.extend(granted)
    if peer == config.after and not config.last:
        state = replace(state, allowed=0, sent=0)
    if peer == DRAFT:
        state = replace(state, cost=PassCost(state.cost.sizes))
    if peer in (DRAFT, config.after) and DRAFT in state.peers:
        effects.append(Send(DRAFT, _ready(state)))
    return state, tuple(effects)


def _ready(state: VerifyState) -> Ready:
    up = state.config.last or state.config.after in state.peers
    return Ready(rank=state.config.rank, up=up, slots=state.config.slots)


def lost(state: VerifyState, peer: Rank) -> tuple[VerifyState, Effects]:
    """Without a neighbour or the draft node no session can go on; the draft node, which has the
    committed path, opens new ones when the pipeline stands again."""
    if peer not in state.peers:
        return state, ()
    config = state.config
    released = tuple(Compute(Release(session)) for session in state.sessions)
    state = replace(state, peers=state.peers - {peer}, sessions={}, closing={}, queue=(), parked=())
    state, abandoned = abandon_dead(state)
    state, granted = grant(state)
    down: Effects = ()
    if peer == config.after and not config.last and DRAFT in state.peers:
        down = (Send(DRAFT, _ready(state)),)
    return state, (*abandoned, *released, *granted, *down)
