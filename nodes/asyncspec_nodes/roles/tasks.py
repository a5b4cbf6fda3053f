"""The tasks that role machines ask their shell to run (``RunTask``), by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from asyncspec.core.machine import Task
from asyncspec.planning import PLANNERS


class PlannerTasks(Mapping[str, Task]):
    """Each planner's decision, by the planner's name."""

    def __getitem__(self, name: str) -> Task:
        return PLANNERS[name].decide

    def __iter__(self) -> Iterator[str]:
        return iter(PLANNERS)

    def __len__(self) -> int:
        return len(PLANNERS)


TASKS: Mapping[str, Task] = PlannerTasks()
