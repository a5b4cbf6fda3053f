"""A device that takes as long as a slower one would: the real work is done, the rest is waited for.

Waiting uses no core, so many emulated devices fit on one machine without disturbing each other.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from asyncspec.core.jobs import Batch, DraftBatch, Forward, Job, draft_jobs
from asyncspec.sim.costs import DraftCost, LevelCache, StageCost
from asyncspec_protocol.messages import Expand

REMEMBERED = 128
"""Jobs and trees that were given up, of which it is known: more than can be under way."""


FORGETS = 0.9
"""What is left of a job whose real work took long after each one whose took less: the pace is to
be kept where many processes share a core."""

LEAD = 0.25
"""Of the time in which an emulated device has nothing to do: so much comes before its real work."""


class Pace(Struct, frozen=True):
    """What an emulated device takes: passes of a stage, calls of a token source."""

    stage: StageCost = StageCost(pass_seconds=0.0)
    source: DraftCost = DraftCost(level_seconds=0.0)
    # Layers of the stage: where a pass that is of no use any more can end.
    layers: int = 1

    def steps(self, job: Job) -> tuple[float, int]:
        """Seconds the job takes, and the equal steps in which it does: a job that is given up ends
        with the step it is in."""
        match job:
            case Forward() | Batch():
                return self.stage.seconds(job.row_count), self.layers
            case Expand() | DraftBatch():
                trees = draft_jobs(job)
                levels = (max(1, tree.depth) if tree.count else 1 for tree in trees)
                return self.source.seconds(*trees), max(levels)
            case _:
                return 0.0, 1


class Paced:
    """Stands between a node and its device, on the device's thread.

    The real work is done amid the wait. A slow device's operations take milliseconds each, in which
    the interpreter is the event loop's; a small model's take microseconds, one right behind the
    other, and would keep it from telling what the job before has brought. And stages that emulate
    equal devices on one machine end their passes together: their real work would take the cores
    just when all of them, and the draft node, have something to tell.

    Where the real work takes longer than the pace, the pace is not kept: nothing is hurried.
    """

    def __init__(
        self,
        run: Callable[[Any], object | None],
        abandon: Callable[[Any], None],
        pace: Pace,
    ) -> None:
        self._run = run
        self._abandon = abandon
        self._pace = pace
        self._lock = threading.Lock()
        self._given_up = threading.Event()
        self._levels = LevelCache()
        # Of its time, what the real work of a job takes: the most, lately.
        self._real = 1.0
        # What is in service, a batch tree by tree, and what was given up: maybe before its turn
        # has come. A batch keeps its pace as long as anybody waits for one of its trees.
        self._parts: tuple[Job, ...] = ()
        self._useless: deque[Job] = deque(maxlen=REMEMBERED)

    def run(self, job: Job) -> object | None:
        """Perform a job, no sooner than its pace allows."""
        start = time.monotonic()
        with self._lock:
            self._parts = draft_jobs(job) or (job,)
            self._given_up.clear()
            self._note()
        seconds, steps = self._pace.steps(self._levels.uncached(job))
        step = seconds / steps
        self._given_up.wait(LEAD * (1 - self._real) * seconds)
        at = time.monotonic()
        result = self._run(job)
        if seconds:
            share = (time.monotonic() - at) / seconds
            self._real = min(1.0, max(share, FORGETS * self._real))
        if seconds and self._given_up.wait(max(0.0, start + seconds - time.monotonic())):
            done = int((time.monotonic() - start) / step) + 1
            time.sleep(max(0.0, start + min(done, steps) * step - time.monotonic()))
        return result

    def abandon(self, job: Job) -> None:
        """See ``StageBackend``: called from another thread."""
        self._abandon(job)
        with self._lock:
            self._useless.append(job)
            self._note()

    def _note(self) -> None:
        """Whether all that is in service is given up."""
        if all(any(job is part for job in self._useless) for part in self._parts):
            self._given_up.set()
