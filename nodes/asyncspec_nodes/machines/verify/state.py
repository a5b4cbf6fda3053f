"""What a stage knows, and where it stands."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from msgspec import Struct

from asyncspec.actor.machine import Effect
from asyncspec.pass_cost import PassCost
from asyncspec_nodes.machines.verify.session import Running, StageSession, Waiting
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import Rank, SessionId

Effects = tuple[Effect, ...]


class VerifyConfig(Struct, frozen=True, dict=True):
    """Where a stage stands. What follows from it is worked out once."""

    rank: Rank
    stages: int
    # Segments that may wait here, the one in service not counted. More hides jitter of the link,
    # fewer leave the choice of what to send to a later moment.
    window: int = 2
    # Tokens are below this; the device has no embedding for others.
    vocab: int = 2**31
    # The layers here, of so many in all: they say which features are known where.
    first_layer: int = 0
    end_layer: int = 2**31
    layers: int = 2**31
    # Credit there is at most for the latency of the link, however long it is (docs/protocol.md).
    most_window: int = 64
    # Cache slots there is memory for; 0: no bound.
    slots: int = 0
    # Rows of a pass over segments of several sessions.
    batch_rows: int = 256

    @cached_property
    def last(self) -> bool:
        """True for the stage with the head."""
        return self.rank == self.stages

    @cached_property
    def before(self) -> Rank:
        """Where segments come from."""
        return Rank(self.rank - 1)

    @cached_property
    def after(self) -> Rank:
        """Where segments go; meaningless on the last stage."""
        return Rank(self.rank + 1)


class VerifyState(Struct, frozen=True):
    """Everything a stage knows. Mappings are never changed in place."""

    config: VerifyConfig
    sessions: Mapping[SessionId, StageSession] = {}
    # Closed while their last pass was still in service: the report waits for its end.
    closing: Mapping[SessionId, StageSession] = {}
    # Highest session id ever opened; what is below and not open is over, and dropped.
    opened: SessionId = SessionId(-1)
    # Closed before their ``Open`` had come down the pipeline.
    closed_early: frozenset[SessionId] = frozenset()
    queue: tuple[Waiting, ...] = ()
    # Segments of one pass of the stage before that are still to come: they belong together.
    expected: int = 0
    # Segments like those of the last pass that fit in one.
    fit: int = 1
    # What passes have taken.
    cost: PassCost = PassCost()
    running: Running | None = None
    # Computed, but the next stage has no credit for them yet. While one waits nothing is started.
    parked: tuple[Waiting, ...] = ()
    peers: frozenset[Rank] = frozenset()
    # Segments the stage before may have sent in all, and those that came, on this link.
    granted: int = 0
    received: int = 0
    # Credit beyond ``config.window``: segments that the link itself holds, by its latency.
    longer: int = 0
    # The same towards the stage after.
    allowed: int = 0
    sent: int = 0


def check_known(state: VerifyState, session: SessionId, peer: Rank) -> None:
    """A session that is over may still be spoken of; one that never was may not."""
    if session > state.opened and session not in state.closed_early:
        raise RemoteProtocolError(f"session {session} was never opened", peer=peer)
