"""A graceful end: what runs is finished, what comes is sent elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from asyncspec_nodes.http.errors import ApiError


class Drain:
    """Requests that are worked on, and whether the service is about to stop."""

    def __init__(self) -> None:
        self.stopping = False
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Around a request. Raises ``ApiError`` once the service is about to stop."""
        if self.stopping:
            raise ApiError(503, "the service is stopping", code="unavailable", retry_after=5)
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def finish(self, seconds: float) -> bool:
        """Take nothing more and wait for what runs; False where that took too long."""
        self.stopping = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
