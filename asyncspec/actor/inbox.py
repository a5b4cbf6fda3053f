"""Answers of the draft node on their way to a reader: text of one request, statuses of nodes.

What waits for a slow reader is bounded: one that leaves too much unread loses its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from asyncspec.core.errors import ClusterError
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import Finished, Output, Status

Event = Output | Finished

MAX_UNREAD = 4096
"""Events that may wait; a reader that keeps up has a few."""


class Inbox:
    """Events of one request. ``cancel`` is called once, unless the request has ended before."""

    def __init__(self, cancel: Callable[[], object], *, limit: int = MAX_UNREAD) -> None:
        self._cancel = cancel
        self._queue: asyncio.Queue[Event | ClusterError] = asyncio.Queue()
        self._most = limit
        # An end is queued, or the reader has left.
        self._over = False

    def put(self, event: Event | ClusterError) -> None:
        """Queue an event or the reason of an early end; never waits."""
        if self._over:
            return
        if isinstance(event, Output) and self._queue.qsize() >= self._most:
            self.close()
            event = ClusterError(f"{self._most} pieces of the answer were left unread")
        self._over = self._over or not isinstance(event, Output)
        self._queue.put_nowait(event)

    async def read(self) -> AsyncIterator[Event]:
        """Yields the events; the last is ``Finished``. Raises ``ClusterError``."""
        while True:
            event = await self._queue.get()
            if isinstance(event, ClusterError):
                raise event
            yield event
            if isinstance(event, Finished):
                return

    def close(self) -> None:
        """The reader leaves."""
        if not self._over:
            self._over = True
            self._cancel()


class StatusAnswers:
    """The answers to one status query; ``complete`` has them all, by rank."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.complete: asyncio.Future[tuple[Status, ...]] = self._loop.create_future()
        self._known: dict[Rank, Status] = {}

    def send(self, status: Status) -> None:
        """A node has answered."""
        self._known[status.rank] = status
        if status.last and not self.complete.done():
            self.complete.set_result(tuple(self._known[rank] for rank in sorted(self._known)))

    def fail(self, error: ClusterError) -> None:
        """No more answers will come."""
        if not self.complete.done():
            self.complete.set_exception(error)
