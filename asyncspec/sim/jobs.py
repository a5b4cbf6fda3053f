"""Jobs at simulated devices: one after another, each for its time, unless they are given up."""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec.structs import replace

from asyncspec.jobs import Batch, Drafting, Forward, Job, drafts
from asyncspec.sim.actor import Actor, Underway
from asyncspec.sim.clock import Clock
from asyncspec.sim.costs import Costs
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import Expand


class Jobs:
    """Runs jobs in order; a job sees the device as the jobs before it have left it.

    ``done`` is told of each at its end, with its result if it has one. ``whole_levels``: a draft
    that is given up ends with the level it is at; else at once.
    """

    def __init__(
        self,
        clock: Clock,
        costs: Costs,
        done: Callable[[Rank, Underway, object | None], None],
        *,
        whole_levels: bool,
    ) -> None:
        self._clock = clock
        self._costs = costs
        self._done = done
        self._whole_levels = whole_levels

    def submit(self, rank: Rank, actor: Actor, job: Job) -> None:
        """Queue a job at a node's device."""
        start = max(actor.busy_until, self._clock.now)
        end = start + self._costs.device(rank, job)
        actor.busy_until = end
        actor.passes += isinstance(job, Forward | Batch)
        number = self._clock.at(end, self._ran, rank, actor)
        actor.underway.append(Underway(job, start, end, number, actor.life))

    def abandon(self, rank: Rank, actor: Actor, job: Job) -> None:
        """End a job now, or as soon as it has begun; what is queued behind it moves up. A batch
        ends when all of its trees are given up. One that hangs (its cost is infinite) does not."""
        now, saved = self._clock.now, 0.0
        for entry in actor.underway:
            if math.isinf(entry.end):
                return
            entry.start -= saved if entry.start > now else 0.0
            entry.end -= saved
            parts = drafts(entry.job) or (entry.job,)
            if any(part is job for part in parts) and job not in entry.useless:
                entry.useless += (job,)
                if len(entry.useless) < len(parts):
                    return
                saved = entry.end - self._stopped(entry)
                entry.end -= saved
            if saved:
                self._clock.cancel(entry.number)
                entry.number = self._clock.at(entry.end, self._ran, rank, actor)
        actor.busy_until -= saved

    def _stopped(self, entry: Underway) -> float:
        """When a job that is given up now ends."""
        now, trees = self._clock.now, drafts(entry.job)
        if not self._whole_levels or not trees or entry.start >= now:
            return max(entry.start, now)
        level = (entry.end - entry.start) / max(max(1, tree.depth) for tree in trees)
        begun = math.ceil((now - entry.start) / level) if level else 0
        return min(entry.end, entry.start + begun * level)

    def _ran(self, rank: Rank, actor: Actor) -> None:
        """The first job under way at a device is done."""
        entry = actor.underway.popleft()
        actor.busy_seconds += entry.end - entry.start
        job = _cut_short(entry.job, entry.useless) if entry.useless else entry.job
        self._done(rank, entry, actor.device(job))


def _cut_short(job: Job, useless: tuple[Job, ...]) -> Job:
    """An abandoned draft still moves the source's context on, but grows nothing."""
    match job:
        case Expand():
            return replace(job, count=0)
        case Drafting(jobs):
            return Drafting(tuple(replace(x, count=0) if x in useless else x for x in jobs))
        case _:
            return job
