"""Emulation of a slower device: jobs are run, and the rest of the time they would take is waited
for, which uses no core, so many emulated devices fit on one machine."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from asyncspec.core.costs import DraftCost, LevelCache, StageCost
from asyncspec.core.jobs import Batch, DraftBatch, Forward, Job, draft_jobs
from asyncspec_protocol.messages import Expand

MAX_ABANDONED = 128
"""Abandoned jobs and trees that are remembered: more than can be in progress."""

DECAY = 0.9
"""Factor of the largest share of real work with each job, as many processes may share a core."""

LEAD = 0.25
"""Share of an emulated device's idle time that comes before its real work."""


class Pace(Struct, frozen=True):
    """What an emulated device takes: passes of a stage, calls of a token source."""

    stage: StageCost = StageCost(pass_seconds=0.0)
    source: DraftCost = DraftCost(level_seconds=0.0)
    # Layers of the stage: an abandoned pass ends after one of them.
    layers: int = 1

    def steps(self, job: Job) -> tuple[float, int]:
        """Seconds of the job, and its number of equal steps, after any of which it can end."""
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
    """Runs a device's jobs at a pace, on the device's thread; longer ones are not hurried.

    The real work is done amid the wait: a small model's operations follow one another within
    microseconds, and would keep the event loop from sending the previous result; and stages that
    emulate equal devices end their passes together, when all nodes need the cores.
    """

    def __init__(
        self, run: Callable[[Any], object | None], abandon: Callable[[Any], None], pace: Pace
    ) -> None:
        self._run = run
        self._abandon = abandon
        self._pace = pace
        self._lock = threading.Lock()
        # The running job is abandoned.
        self._stop = threading.Event()
        self._levels = LevelCache()
        # The largest share of real work in a job's time, lately.
        self._real = 1.0
        # What runs, a batch tree by tree, and what was abandoned, all or part, maybe before it ran.
        self._parts: tuple[Job, ...] = ()
        self._abandoned: deque[Job] = deque(maxlen=MAX_ABANDONED)

    def run(self, job: Job) -> object | None:
        """Perform a job, no sooner than its pace allows."""
        start = time.monotonic()
        with self._lock:
            self._parts = draft_jobs(job) or (job,)
            self._stop.clear()
            self._note()
        seconds, steps = self._pace.steps(self._levels.uncached(job))
        step = seconds / steps
        self._stop.wait(LEAD * (1 - self._real) * seconds)
        at = time.monotonic()
        result = self._run(job)
        if seconds:
            share = (time.monotonic() - at) / seconds
            self._real = min(1.0, max(share, DECAY * self._real))
        if seconds and self._stop.wait(max(0.0, start + seconds - time.monotonic())):
            done = int((time.monotonic() - start) / step) + 1
            time.sleep(max(0.0, start + min(done, steps) * step - time.monotonic()))
        return result

    def abandon(self, job: Job) -> None:
        """See ``StageBackend``: called from another thread."""
        self._abandon(job)
        with self._lock:
            self._abandoned.append(job)
            self._note()

    def _note(self) -> None:
        """Stop where all that runs is abandoned."""
        if all(any(job is part for job in self._abandoned) for part in self._parts):
            self._stop.set()
