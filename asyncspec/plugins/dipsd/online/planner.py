"""DiP-SD as a planner of a running pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from asyncspec.planning import Decision, Planner, StageCosts
from asyncspec.plugins.dipsd.online.request import PlanRequest, drifted, plan_request
from asyncspec_protocol.messages import Rates


class DipSd:
    """Cooperative rotation with optimized lengths and associations (DiP-SD III, IV)."""

    def request(
        self, measured: Sequence[Rates], stages: StageCosts, batch_rows: int
    ) -> PlanRequest:
        return plan_request(measured, stages, batch_rows=batch_rows)

    def drifted(self, old: PlanRequest, new: PlanRequest) -> bool:
        return drifted(old, new)

    def decide(self, request: PlanRequest) -> Decision:
        # numpy takes longer to import than most commands run.
        from asyncspec.plugins.dipsd.online.decide import decide

        return decide(request.deployment, request.noise)


PLANNER: Planner[PlanRequest] = DipSd()
