"""The answers to one question how the nodes are."""

from __future__ import annotations

import asyncio

from asyncspec.errors import ClusterError
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import Status


class Answers:
    """Statuses as they come; ``complete`` has them all, by rank."""

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
        """No more will come."""
        if not self.complete.done():
            self.complete.set_exception(error)
