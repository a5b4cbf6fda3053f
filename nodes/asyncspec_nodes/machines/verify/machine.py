"""The verify stage as a machine: segments in, forward passes, segments or verdicts out.

Law of this package: structure is decided on the draft node alone. A stage knows parents and what is
alive, applies a prune the moment it comes (waiting segments lose their dead rows, rows that die
during a pass are dropped before they are sent on), and never waits for anybody but the next
stage's credit. Several draft nodes may share a stage: each speaks of its own sessions, and what it
does or leaves undone touches no other's. Pure: no clock, no sockets, no tensors.
"""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from asyncspec.actor.machine import (
    Cancelled,
    Computed,
    Fired,
    Input,
    Joined,
    Lost,
    Planned,
    Received,
    Stopped,
    Submitted,
)
from asyncspec.jobs import Batch, Forward
from asyncspec.pass_cost import PassCost
from asyncspec_nodes.machines.owners import check_owner
from asyncspec_nodes.machines.verify import planning, question, turns
from asyncspec_nodes.machines.verify.arrivals import arrived, by_line
from asyncspec_nodes.machines.verify.awaited import TREE
from asyncspec_nodes.machines.verify.passes import send_parked, serve
from asyncspec_nodes.machines.verify.peers import joined, lost, ready
from asyncspec_nodes.machines.verify.prunes import pruned
from asyncspec_nodes.machines.verify.results import computed
from asyncspec_nodes.machines.verify.rota import ROTA
from asyncspec_nodes.machines.verify.sessions import closed, opened, raise_floor
from asyncspec_nodes.machines.verify.state import (
    Effects,
    VerifyConfig,
    VerifyState,
)
from asyncspec_protocol.errors import LocalProtocolError, RemoteProtocolError
from asyncspec_protocol.ids import is_draft
from asyncspec_protocol.messages import (
    Close,
    Credit,
    Floor,
    Open,
    PassTimes,
    PruneIndices,
    Rates,
    Segment,
)


class VerifyMachine:
    """The role ``verify``."""

    def __init__(self, config: VerifyConfig) -> None:
        self.config = config

    def initial(self) -> VerifyState:
        """A stage that has met nobody yet."""
        seconds = [microseconds / 1e6 for microseconds in self.config.tried_microseconds]
        return VerifyState(self.config, cost=PassCost.tried(self.config.tried_rows, seconds))

    def step(self, state: VerifyState, event: Input, now: float) -> tuple[VerifyState, Effects]:
        """React to one input. Raises ``RemoteProtocolError`` for what a peer must not say."""
        # In the order of how often they come.
        match event:
            case Received():
                state, effects = _received(state, event, now)
            case Computed():
                if not isinstance(event.job, Forward | Batch):
                    raise LocalProtocolError("a stage asks for no other result than a pass's")
                state, effects = computed(state, event.job, event.result, event.seconds, now)
            case Joined(peer):
                state, effects = joined(state, peer)
            case Lost(peer):
                state, effects = lost(state, peer)
            case Planned(asked, decision):
                state, effects = planning.planned(state, asked, decision, now)
            case Fired(timer) if timer == ROTA:
                state, effects = turns.fired(state, now)
            case Fired(timer) if timer == TREE:
                state, effects = replace(state, awaited=state.awaited.given_up()), ()
            case Fired() | Submitted() | Cancelled() | Stopped():
                raise LocalProtocolError(f"a stage has no use for {type(event).__name__}")
            case _:
                assert_never(event)
        if state.rota.members:
            state, more = planning.tend(state, now)
            effects += more
        state, more = serve(state, now)
        return state, effects + more


def _received(state: VerifyState, event: Received, now: float) -> tuple[VerifyState, Effects]:
    config, peer, message = state.config, event.peer, event.message
    match message:
        case Segment() if config.fed_by(peer):
            return arrived(by_line(state, message, event.seconds), peer, message, event.tensor, now)
        case Credit() if peer == config.after and not config.last:
            if message.limit < state.allowed:
                raise RemoteProtocolError("credit was taken back", peer=peer)
            state = replace(state, allowed=message.limit, onward_row_seconds=message.row_seconds)
            return send_parked(state, now, waited=True)
        case PruneIndices(session) if is_draft(peer):
            check_owner(session, peer)
            return pruned(state, message, now)
        case Open() if config.fed_by(peer):
            check_owner(message.session, peer)
            if message.shared:
                check_owner(message.like, peer)
            return opened(state, peer, message)
        case Close(session) if is_draft(peer):
            check_owner(session, peer)
            return closed(state, message)
        case Floor(first) if is_draft(peer):
            check_owner(first, peer)
            state, effects = raise_floor(state, peer, first)
            return state, (*effects, ready(state, peer))
        case Rates(session) if config.rank == 1 and is_draft(peer):
            check_owner(session, peer)
            return question.told(state, message), ()
        case PassTimes(rank) if config.rank == 1 and is_draft(peer) and 1 < rank <= config.stages:
            return question.told_times(state, peer, message), ()
        case _:
            raise RemoteProtocolError(f"unexpected {type(message).__name__}", peer=peer)
