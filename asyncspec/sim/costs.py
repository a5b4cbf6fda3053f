"""What things take in virtual time: what the simulator asks, and the papers' own accounting."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from asyncspec.jobs import Batch, Forward, Job, drafts
from asyncspec_protocol.ids import Rank, is_draft
from asyncspec_protocol.messages import Message


class Costs(Protocol):
    """How long things take, in seconds of virtual time."""

    def link(self, source: Rank, target: Rank, message: Message) -> float:
        """From one node to another; order on a link is kept whatever this says."""

    def device(self, rank: Rank, job: Job) -> float:
        """A job on a node's device."""


class Wires(Protocol):
    """What bytes do, where somebody wants to know."""

    def nbytes(self, message: Message) -> int:
        """Length of a message on the wire, tensor included."""

    def carried(self, message: Message) -> float:
        """Seconds that a line takes for a message's bytes."""

    def occupied(self, source: Rank, target: Rank, message: Message) -> float:
        """For so long a message keeps its direction of a link to itself; those behind it wait."""


class EqualTurns(Struct, frozen=True):
    """Every pass takes one turn, whatever its rows; a draft one turn at most; the rest is free.

    The unit is the turn. This is the paper's own accounting (FlowSpec III-A). ``draft_level`` is
    the share of a turn that one draft pass costs: five levels of 0.2 fill a turn.
    """

    draft_level: float = 0.2

    def link(self, source: Rank, target: Rank, message: Message) -> float:
        """Transfers are hidden."""
        return 0.0

    def device(self, rank: Rank, job: Job) -> float:
        """One turn a pass; a draft by its depth."""
        if isinstance(job, Forward | Batch):
            return 1.0
        if is_draft(rank) and (trees := drafts(job)):
            return min(1.0, self.draft_level * max(tree.depth for tree in trees))
        return 0.0
