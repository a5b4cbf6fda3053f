"""A node's device: one worker thread, jobs one after another, results back on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from asyncspec.jobs import Job

Run = Callable[[Any], object | None]
Done = Callable[[Job, object, float], None]
Ran = Callable[[Job, float, float], None]
Failed = Callable[[Job, BaseException], None]
# A job's result, its start and its end.
Timed = tuple[object | None, float, float]


class Device:
    """Runs jobs in the order of ``submit``. The event loop never waits for a tensor.

    All callbacks are called on the event loop: ``ran`` after every job with its start and its end
    (seconds of ``time.monotonic``), then ``done`` where there is a result, or ``failed``. A job
    that raises is our own mistake or a broken device: it is reported, never lost.
    """

    def __init__(self, run: Run, ran: Ran, done: Done, failed: Failed) -> None:
        self._run = run
        self._ran = ran
        self._done = done
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
        self._closed = False
        # Of jobs that are over, and when the one in service has begun. Written by the worker.
        self._worked = 0.0
        self._since: float | None = None

    @property
    def busy_seconds(self) -> float:
        """Time spent on jobs so far, the one in service included."""
        worked, since = self._worked, self._since
        return worked if since is None else worked + time.monotonic() - since

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._pool.submit(self._timed, job).add_done_callback(
            lambda future: self._post(job, future)
        )

    def _timed(self, job: Job) -> Timed:
        at = self._since = time.monotonic()
        try:
            result = self._run(job)
        finally:
            until = time.monotonic()
            self._worked, self._since = self._worked + until - at, None
        return result, at, until

    def _post(self, job: Job, future: Future[Timed]) -> None:
        """On the worker thread: hand the outcome to the loop, unless that is gone."""
        if not self._closed and not future.cancelled():
            self._loop.call_soon_threadsafe(self._deliver, job, future)

    def _deliver(self, job: Job, future: Future[Timed]) -> None:
        if self._closed:
            return
        if (error := future.exception()) is not None:
            self._failed(job, error)
            return
        result, at, until = future.result()
        self._ran(job, at, until)
        if result is not None:
            self._done(job, result, until - at)

    async def close(self) -> None:
        """Forget queued jobs and wait for the one in service."""
        self._closed = True
        await self._loop.run_in_executor(
            None, lambda: self._pool.shutdown(wait=True, cancel_futures=True)
        )
