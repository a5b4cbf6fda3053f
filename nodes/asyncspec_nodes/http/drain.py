"""A graceful end: what runs is finished or told that it is cut, what comes is sent elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from asyncspec_nodes.http.errors import ApiError


class Drain:
    """Requests that are worked on, and whether the service is about to stop."""

    def __init__(self) -> None:
        self.stopping = False
        self.running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        # Around what runs: times out once the service waits no longer.
        self._bounds: set[asyncio.Timeout] = set()

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Around a request. Raises ``ApiError`` once the service is about to stop."""
        if self.stopping:
            raise _stopping()
        self.running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()

    @contextlib.asynccontextmanager
    async def bounded(self) -> AsyncIterator[None]:
        """Around what takes long in a request. Raises ``ApiError`` when it is cut."""
        bound = asyncio.timeout(None)
        try:
            async with bound:
                self._bounds.add(bound)
                try:
                    yield
                finally:
                    self._bounds.discard(bound)
        except TimeoutError:
            if bound.expired():
                raise _stopping() from None
            raise

    async def finish(self, seconds: float) -> bool:
        """Take nothing more and wait for what runs; False where that took too long."""
        self.stopping = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def cut(self) -> None:
        """Take nothing more, and wait for nothing more."""
        self.stopping = True
        now = asyncio.get_running_loop().time()
        for bound in self._bounds:
            bound.reschedule(now)


def _stopping() -> ApiError:
    return ApiError(503, "the service is stopping", code="unavailable", retry_after=5)
