"""A node's device: one worker thread, jobs one after another, results back on the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from asyncspec.jobs import Job

Run = Callable[[Any], object | None]
Done = Callable[[Job, object, float], None]
Ran = Callable[[Job, float, float], None]
Failed = Callable[[Job, BaseException], None]


class Device:
    """Runs jobs in the order of ``submit``. The event loop never waits for a tensor.

    All callbacks are called on the event loop: ``ran`` after every job with its start and its end
    (seconds of ``time.monotonic``), then ``done`` where there is a result, or ``failed``. A job
    that raises is our own mistake or a broken device: it is reported, never lost.

    A thread and a queue of our own, because the way there and back is part of every segment's
    journey and an executor's futures take three times as long.
    """

    def __init__(self, run: Run, ran: Ran, done: Done, failed: Failed) -> None:
        self._run = run
        self._ran = ran
        self._done = done
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        # None: there is nothing more to come.
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._closed = False
        # Of jobs that are over, and when the one in service has begun. Written by the thread.
        self._worked = 0.0
        self._since: float | None = None
        self._thread = threading.Thread(target=self._serve, name="device", daemon=True)
        self._thread.start()

    @property
    def busy_seconds(self) -> float:
        """Time spent on jobs so far, the one in service included."""
        worked, since = self._worked, self._since
        return worked if since is None else worked + time.monotonic() - since

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._jobs.put(job)

    def _serve(self) -> None:
        """The thread."""
        while (job := self._jobs.get()) is not None:
            if self._closed:
                continue
            at = self._since = time.monotonic()
            try:
                result = self._run(job)
            except BaseException as error:
                self._post(self._deliver_error, job, error)
            else:
                until = time.monotonic()
                self._worked, self._since = self._worked + until - at, None
                self._post(self._deliver, job, result, at, until)

    def _post(self, deliver: Callable[..., None], *outcome: object) -> None:
        """Hand an outcome to the loop, unless nobody waits for it any more."""
        if not self._closed:
            self._loop.call_soon_threadsafe(deliver, *outcome)

    def _deliver(self, job: Job, result: object | None, at: float, until: float) -> None:
        if self._closed:
            return
        self._ran(job, at, until)
        if result is not None:
            self._done(job, result, until - at)

    def _deliver_error(self, job: Job, error: BaseException) -> None:
        if not self._closed:
            self._failed(job, error)

    async def close(self) -> None:
        """Forget queued jobs and wait for the one in service."""
        self._closed = True
        self._jobs.put(None)
        await self._loop.run_in_executor(None, self._thread.join)
