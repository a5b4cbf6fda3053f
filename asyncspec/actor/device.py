"""A node's device: jobs one after another on a worker thread, reported on the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

from asyncspec.core.jobs import Admit, Compact, Feed, Import, Job, Release, Trim
from asyncspec_protocol.errors import LocalProtocolError
from asyncspec_protocol.ids import Rank, SessionId, owner

Run = Callable[[Any], object | None]
"""A stage's ``run`` (``backend/tree_stage``) or a token source's (``source/base``)."""

Done = Callable[[Job, object, float, float], None]
Ran = Callable[[Job, float, float], None]
Failed = Callable[[Job, BaseException], None]

HAND_OVER_SECONDS = 100e-6
"""Pause before a job that begins by itself: enough for the event loop to send the last one's
result. Jobs of tiny operations have the interpreter lock again before the event loop's thread has
woken up, and longer ones its processor, or the rest of the node's quota."""

ControlJob = Admit | Compact | Trim | Release | Feed | Import
"""What no credit bounds, unlike passes and drafts: such jobs come as quickly as a peer writes."""

BASE_JOBS, SESSION_JOBS = 64, 4
"""Unfinished control jobs of a draft node above which its link is not read: so many, and so many
more for each of its sessions, whose prunes may all come while one pass runs."""

JOB_SLOTS = 64
"""Slots kept by a ``Compact`` that count as one more job: a tree seldom has more nodes."""


class ControlJobs:
    """Unfinished control jobs, by the draft node whose session they are of."""

    def __init__(self, hold: Callable[[Rank, bool], None]) -> None:
        """``hold`` is told of a draft node whether its link is to be read no further for now."""
        self._hold = hold
        self._pending: Counter[Rank] = Counter()
        # Sessions for which the device holds something.
        self._sessions: dict[Rank, set[SessionId]] = {}

    def submitted(self, job: Job) -> None:
        """The device has one job more."""
        if isinstance(job, ControlJob):
            sessions = self._sessions.setdefault(owner(job.session), set())
            if isinstance(job, Admit | Feed | Import):
                sessions.add(job.session)
            elif isinstance(job, Release):
                sessions.discard(job.session)
            self._count(job, 1)

    def finished(self, job: Job) -> None:
        """The device has done a job."""
        if isinstance(job, ControlJob):
            self._count(job, -1)

    def _count(self, job: ControlJob, sign: int) -> None:
        draft = owner(job.session)
        more = len(job.keep) // JOB_SLOTS if isinstance(job, Compact) else 0
        self._pending[draft] += sign * (1 + more)
        pending = self._pending[draft]
        limit = BASE_JOBS + SESSION_JOBS * len(self._sessions[draft])
        if pending > limit or pending <= limit // 2:
            self._hold(draft, pending > limit)


class DeviceThread:
    """Runs jobs in the order of ``submit``, one at a time.

    ``deliver`` reports finished jobs on the event loop, to which ``wake`` calls: ``ran`` for every
    job with its start and end (seconds of ``time.monotonic``), then ``done`` if it has a result,
    with its seconds and those that it waited, or ``failed`` with the exception it raised.

    A job announced with ``run_next`` starts as soon as the one before it ends: a round trip to a
    busy event loop takes about 1 ms. The caller holds ``start_lock`` while it decides and has all
    finished jobs delivered first, so the next job has either started or can still be changed.

    A thread with queues of its own: an executor's futures take three times as long to hand over.
    """

    def __init__(
        self,
        run: Run,
        ran: Ran,
        done: Done,
        failed: Failed,
        wake: Callable[[], None],
        *,
        on_processor: bool = False,
    ) -> None:
        """``on_processor``: the running thread computes, so when it does not it waits for a
        processor."""
        self._on_processor = on_processor
        self._run = run
        self._wake = wake
        self._ran = ran
        self._done = done
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self.start_lock = threading.Lock()
        """While it is held, no job begins that was not submitted."""
        # The running job, its start (``time.monotonic``) and seconds of those before: the thread's.
        self.running: tuple[Job, float] | None = None
        self._worked = 0.0
        # Reports of finished jobs, for ``deliver``.
        self._reports: deque[Callable[[], None]] = deque()
        # ``_next`` begins when ``_after`` ends; ``_begun`` has begun so and is not submitted yet.
        self._after: Job | None = None
        self._next: Job | None = None
        self._begun: Job | None = None
        # None ends the thread.
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        # Number of jobs that are submitted and not yet delivered.
        self.pending = 0
        self._closed = False
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="device", daemon=True)
        self._thread.start()

    @property
    def busy_seconds(self) -> float:
        """Time spent on jobs so far, the running one included."""
        worked, running = self._worked, self.running
        return worked if running is None else worked + time.monotonic() - running[1]

    def submit(self, job: Job) -> None:
        """Queue a job. Raises ``LocalProtocolError`` where one that ``run_next`` began does not
        come first."""
        self.pending += 1
        if self._begun is not None:
            if self._begun is not job:
                raise LocalProtocolError("a job other than the announced one was submitted next")
            self._begun = None
            return
        if self._next is job:  # announced when the one before it was over already
            self._after = self._next = None
        self._jobs.put(job)

    def run_next(self, after: Job, job: Job | None) -> None:
        """Begin ``job``, or none, when ``after`` ends, behind what is submitted by then."""
        self._after, self._next = after, job

    def deliver(self) -> bool:
        """Report a finished job, if there is one."""
        if not self._reports:
            return False
        self.pending -= 1
        report = self._reports.popleft()
        if not self._closed:
            report()
        return True

    def _main(self) -> None:
        """The thread."""
        try:
            self._serve()
        finally:
            with suppress(RuntimeError):  # it was given up, and the event loop is gone
                self._loop.call_soon_threadsafe(self._over.set)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._closed:
                continue
            report = self._perform(job)
            with self.start_lock:
                self._reports.append(report)
                chained = self._after is job and self._next is not None
                if chained:
                    self._begun = self._next
                    self._after = self._next = None
                    self._jobs.put(self._begun)
            if self._closed:  # the event loop may be gone
                continue
            self._loop.call_soon_threadsafe(self._wake)
            if chained:
                time.sleep(HAND_OVER_SECONDS)

    def _perform(self, job: Job) -> Callable[[], None]:
        """Run a job; returns its report."""
        at, used = time.monotonic(), time.thread_time()
        self.running = job, at
        try:
            result = self._run(job)
        except BaseException as error:
            return partial(self._failed, job, error)
        until = time.monotonic()
        waited = until - at - (time.thread_time() - used) if self._on_processor else 0.0
        self._worked, self.running = self._worked + until - at, None
        return partial(self._report, job, result, at, until, max(0.0, waited))

    def _report(
        self, job: Job, result: object | None, at: float, until: float, waited: float
    ) -> None:
        self._ran(job, at, until)
        if result is not None:
            self._done(job, result, until - at, waited)

    async def close(self) -> None:
        """Drop queued jobs and wait for the running one; where it never ends, cancel this."""
        self._closed = True
        self._jobs.put(None)
        # Not on another thread, for which the event loop's own end would wait.
        await self._over.wait()
        self._thread.join()
