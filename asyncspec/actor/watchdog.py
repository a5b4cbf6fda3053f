"""When a device counts as hung. Pure.

A device that hangs leaves its node's event loop alive: links stay up, heartbeats are answered, and
requests wait for ever. So a node ends when its device has run one job for many times what such jobs
take: its links close, the draft node recovers the sessions, a supervisor restarts the process.
"""

from __future__ import annotations

from typing import assert_never

from asyncspec.core import jobs
from asyncspec.core.jobs import Job
from asyncspec_protocol.messages import Expand

FLOOR_SECONDS = 60.0
"""Least limit of any job: memory may be swapped out, or other programs hold the cores."""

FACTOR = 50.0
"""Limit as a multiple of what jobs of a kind have taken."""

MIN_SAMPLES = 8
"""Jobs of a kind before their times count: the first read weights, or compile kernels."""

COLD_FACTOR = 10.0
"""Limit before that, as a multiple of the floor."""

FADING = 0.9
"""Factor of a kind's slowest time with each faster job of it."""

CHECK_SECONDS = 1.0
"""Between two checks of a device; a quarter of the floor where that is less."""


Kind = tuple[type[Job], bool]
"""A type of jobs, and whether they read a grammar, which takes seconds where it is a new one."""


class DeviceWatchdog:
    """Limits the running job by the times of earlier ones."""

    def __init__(self, floor_seconds: float = FLOOR_SECONDS) -> None:
        self._floor = floor_seconds
        # By kind: how many jobs there were, and by magnitude of their size (bits) the slowest time.
        self._count: dict[Kind, int] = {}
        self._slowest: dict[Kind, dict[int, float]] = {}
        # The running job with its start, and the seconds for which it was seen running.
        self._running: tuple[Job, float] | None = None
        self._waited = 0.0
        self._checked = 0.0

    @property
    def check_seconds(self) -> float:
        """Between two checks."""
        return min(CHECK_SECONDS, self._floor / 4)

    def observe(self, job: Job, seconds: float) -> None:
        """A job is over."""
        kind, size = job_kind(job)
        slowest = self._slowest.setdefault(kind, {})
        slowest[size] = max(seconds, FADING * slowest.get(size, 0.0))
        self._count[kind] = self._count.get(kind, 0) + 1

    def limit(self, job: Job) -> float:
        """Seconds that a job may take."""
        kind, size = job_kind(job)
        cold = self._count.get(kind, 0) < MIN_SAMPLES
        least = COLD_FACTOR * self._floor if cold else self._floor
        # In proportion to the nearest size that is no larger, else as the next larger one.
        slowest = self._slowest.get(kind, {size: 0.0})
        nearest = max((known for known in slowest if known <= size), default=min(slowest))
        expected = slowest[nearest] * 2.0 ** max(0, size - nearest)
        return max(least, FACTOR * expected)

    def check(self, running: tuple[Job, float] | None, now: float) -> str:
        """Given the running job with its start: why the node must end, or nothing. Of a pause
        between checks only two checks' worth counts: a stopped process, or a machine asleep, does
        not hang."""
        passed = min(now - self._checked, 2 * self.check_seconds)
        previous, self._running, self._checked = self._running, running, now
        same = running and previous and running[0] is previous[0] and running[1] == previous[1]
        if running is None or not same:
            self._waited = 0.0
            return ""
        self._waited += passed
        limit = self.limit(running[0])
        if self._waited <= limit:
            return ""
        return (
            f"the device has been busy with one job ({type(running[0]).__name__}) for "
            f"{self._waited:.3g} s, and {limit:.3g} s are the most that [limits] device_seconds "
            "allows: this node is given up"
        )


def job_kind(job: Job) -> tuple[Kind, int]:
    """The kind, and bit length of the size: such jobs differ by less than a factor of two."""
    reads_grammar = False
    match job:
        case jobs.Forward() | jobs.Batch():
            size = job.row_count
        case jobs.Compact(keep=keep):
            size = len(keep)
        case jobs.Admit(common_prefix=size, sampling=sampling):
            reads_grammar = bool(sampling.constraint.grammar)
        case jobs.Trim(slots=size) | jobs.Import(slots=size):
            pass
        case jobs.Export(start=start, end=end):
            size = end - start
        case Expand() | jobs.DraftBatch():
            drafts = jobs.draft_jobs(job)
            size = sum([one.count + len(one.committed) for one in drafts])
            reads_grammar = any(one.grammar for one in drafts)
        case jobs.Feed(rows=rows):
            size = sum([len(some.rows) for some in rows])
        case jobs.Release():
            size = 0
        case _:
            assert_never(job)
    return (type(job), reads_grammar), size.bit_length()
