"""The tasks that role machines ask their shell to run (``RunTask``), by name."""

from __future__ import annotations

from collections.abc import Mapping

from asyncspec.core.machine import Task
from asyncspec.dipsd.online.request import Decision, PlanRequest
from asyncspec_nodes.roles.verify.planning import PLAN_TASK


def _plan(request: PlanRequest) -> Decision:
    # Here, because numpy takes longer to import than most commands run.
    from asyncspec.dipsd.online.decide import decide

    return decide(request.deployment, request.noise)


TASKS: Mapping[str, Task] = {PLAN_TASK: _plan}
