"""Limits of an HTTP service: sizes, time-outs, concurrent answers, graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from msgspec import Struct

from asyncspec_nodes.http.api.errors import ApiError, invalid, unavailable


class Limits(Struct, frozen=True):
    """Sizes in bytes, times in seconds."""

    # JSON may need several bytes for one of the prompt.
    body_bytes: int = 8 * 1024 * 1024
    # Characters (or tokens) of one prompt.
    prompt_length: int = 1_000_000
    # Answers at a time; a further request gets a 429.
    concurrent: int = 64
    # Open connections; for a further one, the stranger's that was quiet for longest is closed.
    connections: int = 2048
    # Connections of one address, without a key and without a request that runs.
    strangers_per_address: int = 256
    # For a connection without a key to say something, where the service asks for keys.
    stranger_seconds: float = 10.0
    # For a connection's first request, for a body, for a whole answer.
    request_seconds: float = 30.0
    body_seconds: float = 30.0
    answer_seconds: float = 600.0
    # For a reader to accept some of what was written.
    stall_seconds: float = 30.0
    # Interval of keep-alive comments in an idle stream.
    alive_seconds: float = 10.0
    # For running answers at shutdown.
    drain_seconds: float = 30.0


class ConcurrencyLimit:
    """Bounds the answers in progress. Requests do not queue here: the draft node has a queue."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.taken = 0

    @contextlib.contextmanager
    def acquire(self, count: int) -> Iterator[None]:
        """Room for ``count`` answers. Raises ``ApiError`` where there is too little."""
        if count > self._limit:
            raise invalid(f"{count} answers are asked for; at most {self._limit} are served", "n")
        if self.taken + count > self._limit:
            raise ApiError(
                429,
                f"{self.taken} of {self._limit} requests at a time are running; try again later",
                code="too_many_requests",
                retry_after=1,
            )
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count


class GracefulShutdown:
    """Once ``stopping``, new requests are refused; running ones finish or are interrupted."""

    def __init__(self) -> None:
        self.stopping = False
        self.running = 0
        self.idle = asyncio.Event()
        self.idle.set()
        # Time-outs around interruptible work; ``interrupt`` makes them expire.
        self._timeouts: set[asyncio.Timeout] = set()

    @contextlib.contextmanager
    def track(self) -> Iterator[None]:
        """Around a request. Raises ``ApiError`` once the service is stopping."""
        if self.stopping:
            raise _stopping()
        self.running += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()

    @contextlib.asynccontextmanager
    async def interruptible(self) -> AsyncIterator[None]:
        """Around the slow part of a request. Raises ``ApiError`` when interrupted."""
        timeout = asyncio.timeout(None)
        self._timeouts.add(timeout)
        try:
            async with timeout:
                yield
        except TimeoutError:
            if timeout.expired():
                raise _stopping() from None
            raise
        finally:
            self._timeouts.discard(timeout)

    def interrupt(self) -> None:
        """Refuse new requests and interrupt running ones."""
        self.stopping = True
        now = asyncio.get_running_loop().time()
        for timeout in self._timeouts:
            timeout.reschedule(now)


def _stopping() -> ApiError:
    return unavailable("the service is stopping", retry_after=5)
