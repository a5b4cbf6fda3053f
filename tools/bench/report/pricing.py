"""What work costs where the token source is a real one: it computes a level of a tree once."""

from __future__ import annotations

from asyncspec.jobs import Job
from asyncspec.sim.cluster_cost import ClusterCost, Pricing
from asyncspec.sim.draft_levels import KnownLevels
from asyncspec_protocol.ids import Rank


class SourcePricing(Pricing):
    """``Pricing`` would let a source pay for levels it knows."""

    def __init__(self, cost: ClusterCost) -> None:
        super().__init__(cost)
        self._levels = KnownLevels()

    def device(self, rank: Rank, job: Job) -> float:
        """See ``Costs``."""
        return super().device(rank, self._levels.rest(job))
