"""A world whose nodes share the processors of one machine: so many jobs run at full speed at a
time, and more of them share the processors evenly."""

from __future__ import annotations

from typing import Any

from asyncspec.core.jobs import Batch, Forward, Job, draft_jobs
from asyncspec.core.machine import Computed
from asyncspec.sim.world import Actor, QueuedJob, World, without_growth
from asyncspec_protocol.ids import Rank

NONE = -1
"""Number of no event."""


class SharedWorld(World):
    """As ``World``, with so many ``processors`` for all nodes. Abandoned jobs end at once."""

    def __init__(self, *arguments: Any, processors: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._processors = processors
        # Seconds, alone on a processor, that each running job still takes, as of a time.
        self._left: dict[Rank, float] = {}
        self._as_of = 0.0
        # Number of the clock's event at the next end.
        self._next = NONE

    def restart(self, rank: Rank, actor: Actor) -> None:
        """Replace a node; its job ends."""
        self._advance()
        self._left.pop(rank, None)
        super().restart(rank, actor)
        self._schedule()

    def _submit(self, rank: Rank, actor: Actor, job: Job) -> None:
        """Queue a job: ``end - start`` of its entry are its seconds alone on a processor."""
        actor.passes += isinstance(job, Forward | Batch)
        seconds = self._costs.device(rank, job)
        actor.queue.append(QueuedJob(job, self.now, self.now + seconds, NONE))
        self._advance()
        self._begin(rank, actor)
        self._schedule()

    def _begin(self, rank: Rank, actor: Actor) -> None:
        """Begin the first job of a device that is idle."""
        if actor.queue and rank not in self._left:
            entry = actor.queue[0]
            seconds = entry.end - entry.start
            entry.start, entry.end = self.now, self.now + seconds
            self._left[rank] = seconds

    def _advance(self) -> None:
        """Let the running jobs come as far as they are by now."""
        done = (self.now - self._as_of) * self._speed
        self._left = {rank: max(0.0, left - done) for rank, left in self._left.items()}
        self._as_of = self.now

    @property
    def _speed(self) -> float:
        return min(1.0, self._processors / max(1, len(self._left)))

    def _schedule(self) -> None:
        """Come back when the next job ends."""
        if self._next != NONE:
            self._clock.cancel(self._next)
        if self._left:
            rank = min(self._left, key=self._left.__getitem__)
            when = self.now + self._left[rank] / self._speed
            self._next = self._clock.at(when, self._end, rank)

    def _end(self, rank: Rank) -> None:
        self._next = NONE
        self._advance()
        actor, left = self.actors[rank], self._left.pop(rank)
        entry = actor.queue.popleft()
        seconds = self.now - entry.start
        worked = min(seconds, entry.end - entry.start - left)
        actor.busy_seconds += seconds
        actor.busy_until = self.now
        self._begin(rank, actor)
        self._schedule()
        if rank in self._trace_hooks:
            self._trace_hooks[rank].ran(entry.job, entry.start, self.now)
        result = actor.device(without_growth(entry))
        if result is not None:
            self.feed(rank, Computed(entry.job, result, seconds, seconds - worked))

    def _abandon(self, rank: Rank, actor: Actor, job: Job) -> None:
        self._advance()
        for entry in actor.queue:
            parts = draft_jobs(entry.job) or (entry.job,)
            if any(part is job for part in parts) and job not in entry.abandoned:
                entry.abandoned += (job,)
                if len(entry.abandoned) < len(parts):
                    return
                if entry is actor.queue[0]:
                    entry.end -= self._left[rank]
                    self._left[rank] = 0.0
                else:
                    entry.end = entry.start
        self._schedule()
