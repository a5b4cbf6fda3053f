"""Which cores processes run on. Linux.

Left alone, the scheduler puts a process that is woken over loopback on its waker's own core as long
as they take turns, and what travels stays in that core's cache: no two machines are so close.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def can_part() -> bool:
    """Whether there are two cores to choose from."""
    return len(os.sched_getaffinity(0)) > 1


@contextmanager
def apart(pids: Iterable[int]) -> Iterator[None]:
    """The calling thread on one core and all threads of some processes on another, until the block
    is left."""
    free = os.sched_getaffinity(0)
    here, there = sorted(free)[:2]
    tasks = [int(task.name) for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    try:
        os.sched_setaffinity(0, {here})
        for task in tasks:
            os.sched_setaffinity(task, {there})
        yield
    finally:
        for task in (0, *tasks):
            os.sched_setaffinity(task, free)
