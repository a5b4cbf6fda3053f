"""What work costs where the token source is a real one: it computes a level of a tree once.

Asked again below the same tip, only deeper (FlowSpec's score-aware expansion), a source pays for
the levels that are new, as FlowSpec's own does. ``Pricing`` would let it pay for all of them.
"""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec.jobs import Job
from asyncspec.sim.cluster_cost import Pricing
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import Expand


class SourcePricing(Pricing):
    """For one session. A tree that hangs from given nodes (PipeDec) has only new levels."""

    # Levels below the tip that are known.
    _known = 0

    def device(self, rank: Rank, job: Job) -> float:
        """See ``Costs``."""
        if isinstance(job, Expand):
            known = 0 if job.committed else self._known
            self._known = max(known, 0 if job.frontier else job.depth)
            if known and not job.frontier:
                job = replace(job, depth=max(1, job.depth - known))
        return super().device(rank, job)
