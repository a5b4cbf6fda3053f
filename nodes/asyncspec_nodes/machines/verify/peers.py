"""Neighbours and draft nodes come and go."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from asyncspec.actor.machine import Compute, Effect, Send
from asyncspec.jobs import Release
from asyncspec_nodes.machines.verify.costs import tell_costs
from asyncspec_nodes.machines.verify.credit import grant, put
from asyncspec_nodes.machines.verify.prunes import abandon_dead
from asyncspec_nodes.machines.verify.sessions import report
from asyncspec_nodes.machines.verify.state import UNKNOWN, Effects, Inflow, VerifyState, know
from asyncspec_protocol.ids import Rank, SessionId, is_draft, owner
from asyncspec_protocol.messages import Ready


def joined(state: VerifyState, peer: Rank) -> tuple[VerifyState, Effects]:
    """A link is up: credit starts anew on it."""
    config = state.config
    state = replace(state, peers=state.peers | {peer})
    effects: list[Effect] = []
    if config.fed_by(peer):
        state, granted = grant(put(state, peer, Inflow()), (peer,))
        effects.extend(granted)
    if is_draft(peer):
        news = state.drafts if config.slots else (peer,)  # all shares are smaller now
        effects.extend(ready(state, draft) for draft in news)
        # Told once more, to all of them: it is little, and this one knows nothing yet.
        state, told = tell_costs(replace(state, cost=state.cost.untold()))
        effects.extend(told)
    elif peer == config.after and not config.last:
        state = replace(state, allowed=0, sent=0)
        effects.extend(ready(state, draft) for draft in state.drafts)
    return state, tuple(effects)


def ready(state: VerifyState, draft: Rank) -> Send:
    """What a draft node is told of this stage, and of its own sessions here."""
    up = state.config.last or state.config.after in state.peers
    known = state.known.get(draft, UNKNOWN)
    message = Ready(state.config.rank, up, _share(state), known.opened, known.floor)
    return Send(draft, message)


def _share(state: VerifyState) -> int:
    """Cache slots that a draft node may count on: it knows of no other one's sessions."""
    slots = state.config.slots
    return max(1, slots // len(state.drafts)) if slots else 0


def lost(state: VerifyState, peer: Rank) -> tuple[VerifyState, Effects]:
    """Without its draft node no session can go on, and without a neighbour none at all; the draft
    nodes, which have the committed paths, open new ones when the pipeline stands again."""
    if peer not in state.peers:
        return state, ()
    config = state.config
    inflows = {rank: inflow for rank, inflow in state.inflows.items() if rank != peer}
    state = replace(state, peers=state.peers - {peer}, inflows=inflows)
    everything = state.sessions.keys() | state.closing.keys() | state.kept.keys()
    over = frozenset(s for s in everything if not is_draft(peer) or owner(s) == peer)
    state, dropped = _drop(state, over)
    if is_draft(peer) and peer in state.known:
        # What it has closed will not be opened here while it is away, and is over when it is back
        # (``Floor``).
        state = know(state, peer, replace(state.known[peer], closed_early=frozenset()))
    told: Effects = ()
    if (peer == config.after and not config.last) or (is_draft(peer) and config.slots):
        told = tuple(ready(state, draft) for draft in state.drafts)
    return state, (*dropped, *told)


def _drop(state: VerifyState, over: Collection[SessionId]) -> tuple[VerifyState, Effects]:
    """Sessions are over, and all that waits of them; what they have cost is told to whoever is
    there to hear it."""
    held = (*state.sessions, *state.kept)
    released = tuple(Compute(Release(session)) for session in held if session in over)
    open_ones = {**state.closing, **state.sessions}
    told = tuple(report(session) for name, session in open_ones.items() if name in over)
    state = replace(
        state,
        sessions={k: v for k, v in state.sessions.items() if k not in over},
        closing={k: v for k, v in state.closing.items() if k not in over},
        kept={k: v for k, v in state.kept.items() if k not in over},
        queue=tuple([w for w in state.queue if w.session not in over]),
        parked=tuple([w for w in state.parked if w.session not in over]),
    )
    state, abandoned = abandon_dead(state)
    state, granted = grant(state)
    return state, (*abandoned, *released, *told, *granted)
