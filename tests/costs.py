"""Costs of simulated clusters for laws."""

from __future__ import annotations

from msgspec import Struct

from asyncspec.core.jobs import Batch, Forward, Job, draft_jobs
from asyncspec_protocol.ids import Rank, is_draft
from asyncspec_protocol.messages import Message


class UnitCosts(Struct, frozen=True):
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
        if is_draft(rank) and (trees := draft_jobs(job)):
            return min(1.0, self.draft_level * max(tree.depth for tree in trees))
        return 0.0
