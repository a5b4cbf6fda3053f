"""A node of a simulated cluster: a machine, and a device that runs jobs one after another."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from asyncspec.backend.base import Tensors
from asyncspec.core.jobs import Batch, DraftBatch, Forward, Job, draft_jobs
from asyncspec.core.machine import Compute, Computed, Effect, Input, Machine, RunNext
from asyncspec.sim.costs import Costs
from asyncspec.sim.network import VirtualClock
from asyncspec_protocol.errors import LocalProtocolError
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import Expand


class QueuedJob(Struct):
    """A job at a device: queued or running."""

    job: Job
    start: float
    end: float
    # Of the clock's event at its end.
    number: int
    # What of it is abandoned: all of it, or some trees of a batch.
    abandoned: tuple[Job, ...] = ()


class Actor(Struct):
    """A node of the world: a machine, its state and its device."""

    machine: Machine[Any]
    state: Any
    device: Callable[[Any], object | None]
    # Handles to bytes and back; None: handles travel as tuples of rows.
    tensors: Tensors | None = None
    queue: deque[QueuedJob] = field(default_factory=deque)
    busy_until: float = 0.0
    busy_seconds: float = 0.0
    passes: int = 0
    run_next: RunNext | None = None

    def check_next_job(self, event: Input, effects: Iterable[Effect]) -> None:
        """Raises ``LocalProtocolError`` for another job than ``RunNext`` said, which has begun."""
        announced = self.run_next
        if announced is None or not isinstance(event, Computed) or event.job is not announced.after:
            return
        computed = next((effect.job for effect in effects if isinstance(effect, Compute)), None)
        if announced.job is not None and computed is not announced.job:
            raise LocalProtocolError("a step does not compute the job that RunNext announced")
        self.run_next = None


class DeviceQueues:
    """Runs jobs in order; a job sees the device as the jobs before it have left it."""

    def __init__(
        self,
        clock: VirtualClock,
        costs: Costs,
        finished: Callable[[Rank, Actor, QueuedJob, object | None], None],
        *,
        whole_levels: bool,
    ) -> None:
        """``finished``: called at each job's end, with its result if it has one. ``whole_levels``:
        an abandoned draft ends with its present level, as on a real device; else at once."""
        self._clock = clock
        self._costs = costs
        self._finished = finished
        self._whole_levels = whole_levels

    def submit(self, rank: Rank, actor: Actor, job: Job) -> None:
        """Queue a job at a node's device."""
        start = max(actor.busy_until, self._clock.now)
        end = actor.busy_until = start + self._costs.device(rank, job)
        actor.passes += isinstance(job, Forward | Batch)
        number = self._clock.at(end, self._finish, rank, actor)
        actor.queue.append(QueuedJob(job, start, end, number))

    def abandon(self, rank: Rank, actor: Actor, job: Job) -> None:
        """End a job now, or as soon as it has begun; what is queued behind it moves up. A batch
        ends when all of its trees are abandoned. One of infinite cost does not end."""
        now, saved = self._clock.now, 0.0
        for entry in actor.queue:
            if math.isinf(entry.end):
                return
            entry.start -= saved if entry.start > now else 0.0
            entry.end -= saved
            parts = draft_jobs(entry.job) or (entry.job,)
            if any(part is job for part in parts) and job not in entry.abandoned:
                entry.abandoned += (job,)
                if len(entry.abandoned) < len(parts):
                    return
                saved = entry.end - self._end_of_abandoned(entry)
                entry.end -= saved
            if saved:
                self._clock.cancel(entry.number)
                entry.number = self._clock.at(entry.end, self._finish, rank, actor)
        actor.busy_until -= saved

    def clear(self, actor: Actor) -> None:
        """The jobs of a node never end."""
        for entry in actor.queue:
            self._clock.cancel(entry.number)

    def _end_of_abandoned(self, entry: QueuedJob) -> float:
        now, trees = self._clock.now, draft_jobs(entry.job)
        if not self._whole_levels or not trees or entry.start >= now:
            return max(entry.start, now)
        level = (entry.end - entry.start) / max(max(1, tree.depth) for tree in trees)
        begun = math.ceil((now - entry.start) / level) if level else 0
        return min(entry.end, entry.start + begun * level)

    def _finish(self, rank: Rank, actor: Actor) -> None:
        """The first job of a device ends."""
        entry = actor.queue.popleft()
        actor.busy_seconds += entry.end - entry.start
        self._finished(rank, actor, entry, actor.device(_without_growth(entry)))


def _without_growth(entry: QueuedJob) -> Job:
    """The job; its abandoned drafts still move the source's context on, but grow nothing."""
    job, abandoned = entry.job, entry.abandoned
    if abandoned and isinstance(job, Expand):
        return replace(job, count=0)
    if abandoned and isinstance(job, DraftBatch):
        return DraftBatch(tuple(replace(x, count=0) if x in abandoned else x for x in job.jobs))
    return job
