"""A node's device: jobs one after another on a worker thread, results back on the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from asyncspec.core.cost_model.short_jobs import ShortJobs
from asyncspec.core.jobs import Job
from asyncspec_protocol.errors import LocalProtocolError

Run = Callable[[Any], object | None]
Done = Callable[[Job, object, float], None]
Ran = Callable[[Job, float, float], None]
Failed = Callable[[Job, BaseException], None]


BRIEF_SECONDS = 10e-3
"""The operations of jobs that take less are tiny. Each of them leaves the interpreter to other
threads, but the next one has it again before the event loop's has woken up."""

HAND_OVER_SECONDS = 100e-6
"""Long enough for that: what a brief job has brought is sent before the next one begins."""


class Device:
    """Runs jobs in the order of ``submit``, one at a time.

    Jobs expected to be shorter than a hand-over to the thread (``ShortJobs``) run on the event
    loop, in ``work``, while the thread is idle. All others run on the thread.

    ``deliver`` reports finished jobs on the event loop, to which ``wake`` calls: ``ran`` for every
    job with its start and end (seconds of ``time.monotonic``), then ``done`` if it has a result, or
    ``failed`` with the exception it raised.

    A job announced with ``run_next`` starts on the thread as soon as the one before it ends: a
    round trip to a busy event loop takes about 1 ms. The caller holds ``start_lock`` while it
    decides and has all finished jobs delivered first, so the next job has either started or can
    still be changed.

    A thread with queues of its own, because an executor's futures take three times as long to hand
    a job over and back.
    """

    def __init__(
        self, run: Run, ran: Ran, done: Done, failed: Failed, wake: Callable[[], None]
    ) -> None:
        self._run = run
        self._wake = wake
        self._ran = ran
        self._done = done
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._short = ShortJobs()
        self.start_lock = threading.Lock()
        """While it is held, no job begins that was not submitted."""
        # Jobs that are over, for ``deliver``: whom to tell, and what.
        self._over: deque[tuple[Any, ...]] = deque()
        # What begins when ``after`` has ended; what has begun so and was not submitted yet.
        self._after: Job | None = None
        self._next: Job | None = None
        self._begun: Job | None = None
        # Short ones, for ``work``. They come before anything that is submitted after them.
        self._here: deque[Job] = deque()
        # None: there is nothing more to come.
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        # Given to the thread and not yet delivered from there.
        self._away = 0
        self._closed = False
        # Of jobs that are over, and when the one in service has begun. Written by who runs it.
        self._worked = 0.0
        self._service: tuple[Job, float] | None = None
        self._thread = threading.Thread(target=self._serve, name="device", daemon=True)
        self._thread.start()

    @property
    def busy_seconds(self) -> float:
        """Time spent on jobs so far, the one in service included."""
        worked, service = self._worked, self._service
        return worked if service is None else worked + time.monotonic() - service[1]

    @property
    def service(self) -> tuple[Job, float] | None:
        """The job in service, and since when (seconds of ``time.monotonic``)."""
        return self._service

    @property
    def under_way(self) -> int:
        """Jobs that were submitted and of whose end nobody was told."""
        return len(self._here) + self._away

    def submit(self, job: Job) -> None:
        """Queue a job; the caller has to call ``work`` soon. One that has begun by itself has to be
        submitted too, before any other. Raises ``LocalProtocolError`` where it is not."""
        if self._begun is not None:
            if self._begun is not job:
                raise LocalProtocolError("the device went on with what nobody has asked for")
            self._begun = None
            self._away += 1
            return
        if self._next is job:  # said when the one before it was over already
            self._after = self._next = None
        if not self._away and self._short.expects(job):
            self._here.append(job)
            return
        while self._here:
            self._send_away(self._here.popleft())
        self._send_away(job)

    def run_next(self, after: Job, job: Job | None) -> None:
        """When ``after`` ends begin with ``job``, behind all that is submitted until then; with
        nothing if that is None. ``start_lock`` is held."""
        self._after, self._next = after, job

    def deliver(self) -> bool:
        """Tell of a job that is over, if there is one."""
        if not self._over:
            return False
        away, tell, *what = self._over.popleft()
        self._away -= away
        tell(*what)
        return True

    def work(self) -> bool:
        """Run one short job on the calling thread, the event loop's, if one waits."""
        if not self._here:
            return False
        self._over.append((0, *self._perform(self._here.popleft())))
        return self.deliver()

    def _send_away(self, job: Job) -> None:
        self._away += 1
        self._jobs.put(job)

    def _serve(self) -> None:
        """The thread."""
        while (job := self._jobs.get()) is not None:
            if self._closed:
                continue
            worked = self._worked
            outcome = self._perform(job)
            brief = self._worked - worked < BRIEF_SECONDS
            with self.start_lock:
                self._over.append((1, *outcome))
                goes_on = self._after is job and self._next is not None
                if goes_on:
                    self._begun = self._next
                    self._after = self._next = None
                    self._jobs.put(self._begun)
            if self._closed:  # nobody waits for it any more
                continue
            self._loop.call_soon_threadsafe(self._wake)
            if goes_on and brief:
                time.sleep(HAND_OVER_SECONDS)

    def _perform(self, job: Job) -> tuple[Any, ...]:
        """Run a job; who is to be told of it, and what."""
        at = time.monotonic()
        self._service = job, at
        try:
            result = self._run(job)
        except BaseException as error:
            return self._deliver_error, job, error
        until = time.monotonic()
        self._worked, self._service = self._worked + until - at, None
        return self._deliver, job, result, at, until

    def _deliver(self, job: Job, result: object | None, at: float, until: float) -> None:
        if self._closed:
            return
        self._short.observe(job, until - at)
        self._ran(job, at, until)
        if result is not None:
            self._done(job, result, until - at)

    def _deliver_error(self, job: Job, error: BaseException) -> None:
        if not self._closed:
            self._failed(job, error)

    def give_up(self) -> None:
        """Forget all jobs and wait for none: the one in service may never end. Its thread stays."""
        self._closed = True
        self._here.clear()
        self._jobs.put(None)

    async def close(self) -> None:
        """Forget queued jobs and wait for the one in service."""
        self.give_up()
        await self._loop.run_in_executor(None, self._thread.join)
