"""What a stage knows, and where it stands."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.cost_model.passes import PassCost
from asyncspec.core.kv_slots import SlotTable
from asyncspec.core.machine import Effect
from asyncspec_nodes.roles.verify.batch_schedule import BatchSchedule
from asyncspec_nodes.roles.verify.session import Running, StageSession, Waiting
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import Rank, SessionId, is_draft, owner

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
    # Credit there is at most for the latency of the link, however long it is
    # (docs/reference/protocol.md).
    most_window: int = 64
    # Cache slots there is memory for; 0: no bound.
    slots: int = 0
    # Rows of a pass over segments of several sessions.
    batch_rows: int = 256
    # Passes that were tried before there was any work: rows of each, and microseconds it took.
    tried_rows: tuple[int, ...] = ()
    tried_microseconds: tuple[int, ...] = ()

    @cached_property
    def last(self) -> bool:
        """True for the stage with the head."""
        return self.rank == self.stages

    @cached_property
    def after(self) -> Rank:
        """Where segments go; meaningless on the last stage."""
        return Rank(self.rank + 1)

    def fed_by(self, peer: Rank) -> bool:
        """Whether segments come from a peer: to the first stage from every draft node."""
        return is_draft(peer) if self.rank == 1 else peer == self.rank - 1

    def way_of(self, session: SessionId) -> Rank:
        """The peer that a session's segments come from."""
        return owner(session) if self.rank == 1 else Rank(self.rank - 1)


class Inflow(Struct, frozen=True):
    """The segments of one link, since it came up."""

    # Those the peer may have sent in all, and those that came.
    granted: int = 0
    received: int = 0
    # Credit beyond ``config.window``: segments that the link itself holds, by its latency.
    longer: int = 0
    # Segments that were sent at once and are still to come: they belong together.
    expected: int = 0


class Known(Struct, frozen=True):
    """What is known of one draft node's sessions, its links' ups and downs apart."""

    # Highest session id ever opened; what is below and not open is over, and dropped.
    opened: SessionId = SessionId(-1)
    # Closed before their ``Open`` had come down the pipeline.
    closed_early: frozenset[SessionId] = frozenset()
    # Sessions below are over, as the draft node has said (``Floor``).
    floor: SessionId = SessionId(0)


UNKNOWN = Known()


class Following(Struct, frozen=True):
    """A pass that has not begun: what it leaves of the queue, and each session's slots with it."""

    running: Running
    queue: tuple[Waiting, ...]
    slots: Mapping[SessionId, SlotTable]


class VerifyState(Struct, frozen=True):
    """Everything a stage knows. Mappings are never changed in place."""

    config: VerifyConfig
    sessions: Mapping[SessionId, StageSession] = {}
    # Closed while their last pass was still in service: the report waits for its end.
    closing: Mapping[SessionId, StageSession] = {}
    # Sessions that are over and whose prompts are kept, with the length of each.
    kept: Mapping[SessionId, int] = {}
    # By draft node; also of those that are gone, whose segments may still be under way.
    known: Mapping[Rank, Known] = {}
    # In the order in which they came, from whomever.
    queue: tuple[Waiting, ...] = ()
    # Segments like those of the last pass that fit in one.
    fit: int = 1
    # What passes have taken.
    cost: PassCost = PassCost()
    # What the line from the stage before takes for a row, and what of it the draft nodes were told.
    row_seconds: float = 0.0
    row_seconds_told: float = 0.0
    running: Running | None = None
    # What the device goes on with when that has ended, and what this was planned from.
    following: Following | None = None
    planned_from: tuple[object, ...] = ()
    # Computed, but the next stage has no credit for them yet. While one waits nothing is started.
    parked: tuple[Waiting, ...] = ()
    peers: frozenset[Rank] = frozenset()
    # By the peer that segments come from, while its link is up.
    inflows: Mapping[Rank, Inflow] = {}
    # Segments the stage after allows in all on this link, and those sent; what the line to it takes
    # for a row. 0: not known.
    allowed: int = 0
    sent: int = 0
    onward_row_seconds: float = 0.0
    # First stage only: who is verified together.
    schedule: BatchSchedule = BatchSchedule()

    @property
    def drafts(self) -> tuple[Rank, ...]:
        """The draft nodes that are linked, in order."""
        return tuple(sorted(filter(is_draft, self.peers)))


def check_was_opened(state: VerifyState, session: SessionId, peer: Rank) -> None:
    """A session that is over may still be spoken of; one that never was may not."""
    known = state.known.get(owner(session), UNKNOWN)
    if session > known.opened and session not in known.closed_early:
        raise RemoteProtocolError(f"session {session} was never opened", peer=peer)


def know(state: VerifyState, draft: Rank, known: Known) -> VerifyState:
    """The state with what is known of a draft node's sessions now."""
    return replace(state, known={**state.known, draft: known})
