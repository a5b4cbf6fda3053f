"""When a device counts as hung. Pure.

A device that hangs leaves its node's event loop alive: links stay up, heartbeats are answered, and
the requests that wait for the job would wait for ever. So a node is given up when its device has
been at one job for many times what such jobs take. Its process ends, its links close, the draft
node recovers the sessions, and a supervisor starts the process again.
"""

from __future__ import annotations

from typing import assert_never

from asyncspec.core.jobs import (
    Admit,
    Batch,
    Compact,
    DraftBatch,
    Feed,
    Forward,
    Job,
    Release,
    Trim,
    draft_jobs,
)
from asyncspec_protocol.messages import Expand

FLOOR_SECONDS = 60.0
"""No job is given up sooner, however short such jobs are: memory may have been swapped out, and
other programs may hold the cores."""

FACTOR = 50.0
"""Times what jobs of a kind have taken."""

PROOF = 8
"""Jobs of a type after which its times say something. The first ones read weights from a disk,
compile kernels or choose them."""

FIRST = 10.0
"""Times the floor that a job may take before there is proof."""

FADING = 0.9
"""What stays of the slowest time of a kind with every faster job of it."""

CHECK_SECONDS = 1.0
"""Between two looks at a device; a quarter of the floor where that is less."""


class DeviceWatchdog:
    """Learns from times how long a job may take, and watches the one in service."""

    def __init__(self, floor_seconds: float = FLOOR_SECONDS) -> None:
        self._floor = floor_seconds
        # By type: how many jobs there were, and by magnitude of their size (bits) the slowest time.
        self._count: dict[type[Job], int] = {}
        self._slowest: dict[type[Job], dict[int, float]] = {}
        # The job in service, since when, and for how many seconds it was seen there.
        self._service: tuple[Job, float] | None = None
        self._waited = 0.0
        self._checked = 0.0

    @property
    def check_seconds(self) -> float:
        """Between two looks."""
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
        first = self._floor if self._count.get(kind, 0) >= PROOF else FIRST * self._floor
        return max(first, FACTOR * self._expected(kind, size))

    def check(self, service: tuple[Job, float] | None, now: float) -> str:
        """The job in service and when it has begun, as it is ``now``; why the node is to be given
        up, or nothing.

        Only time between looks counts, and of a pause no more than two looks' worth: a process that
        was stopped, or a machine that was asleep, has not seen its device hang.
        """
        passed = min(now - self._checked, 2 * self.check_seconds)
        known, self._checked = self._service, now
        self._service = service
        if service is None or known is None or service[0] is not known[0] or service[1] != known[1]:
            self._waited = 0.0
            return ""
        self._waited += passed
        limit = self.limit(service[0])
        if self._waited <= limit:
            return ""
        return (
            f"the device has been busy with one job ({type(service[0]).__name__}) for "
            f"{self._waited:.3g} s, and {limit:.3g} s are the most that [limits] device_seconds "
            "allows: this node is given up"
        )

    def _expected(self, kind: type[Job], size: int) -> float:
        """Of the nearest size that is no larger, in proportion to the rows; else of the next larger
        one."""
        slowest = self._slowest.get(kind, {})
        if smaller := [known for known in slowest if known <= size]:
            nearest = max(smaller)
            return slowest[nearest] * 2.0 ** (size - nearest)
        return slowest[min(slowest)] if slowest else 0.0


def job_kind(job: Job) -> tuple[type[Job], int]:
    """Type, and bit length of the size: jobs of one kind differ by less than a factor of two."""
    match job:
        case Forward() | Batch():
            size = job.row_count
        case Compact(keep=keep):
            size = len(keep)
        case Admit(common_prefix=size) | Trim(slots=size):
            pass
        case Expand() | DraftBatch():
            size = sum([one.count + len(one.committed) for one in draft_jobs(job)])
        case Feed(rows=rows):
            size = sum([len(some.rows) for some in rows])
        case Release():
            size = 0
        case _:
            assert_never(job)
    return type(job), size.bit_length()
