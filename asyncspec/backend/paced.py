"""A device that takes as long as a slower one would: the real work is done, the rest is waited for.

Waiting uses no core, so many emulated devices fit on one machine without disturbing each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from asyncspec.jobs import Batch, Forward, Job, Release
from asyncspec.sim.draft_cost import DraftCost
from asyncspec.sim.draft_levels import KnownLevels
from asyncspec.sim.stage_cost import StageCost
from asyncspec_protocol.messages import Expand


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
            case Expand(depth=depth, count=count):
                return self.source.seconds(job), max(1, depth) if count else 1
            case _:
                return 0.0, 1


class Paced:
    """Stands between a node and its device, on the device's thread.

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
        self._levels = KnownLevels()
        # The job in service, and one that was given up: maybe before its turn has come.
        self._job: Job | None = None
        self._useless: Job | None = None

    def run(self, job: Job) -> object | None:
        """Perform a job, no sooner than its pace allows."""
        start = time.monotonic()
        with self._lock:
            self._job = job
            self._given_up.clear()
            if self._useless is job:
                self._given_up.set()
        result = self._run(job)
        seconds, steps = self._pace.steps(self._to_pay(job))
        step = seconds / steps
        if seconds and self._given_up.wait(max(0.0, start + seconds - time.monotonic())):
            done = int((time.monotonic() - start) / step) + 1
            time.sleep(max(0.0, start + min(done, steps) * step - time.monotonic()))
        return result

    def _to_pay(self, job: Job) -> Job:
        """A source pays for a level once."""
        if isinstance(job, Expand):
            return self._levels.rest(job)
        if isinstance(job, Release):
            self._levels.forget(job.session)
        return job

    def abandon(self, job: Job) -> None:
        """See ``StageBackend``: called from another thread."""
        self._abandon(job)
        with self._lock:
            self._useless = job
            if self._job is job:
                self._given_up.set()
