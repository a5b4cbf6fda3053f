"""Writes a running cluster's trace to a file while it runs."""

from __future__ import annotations

import asyncio

from asyncspec.core.errors import ClusterError, UserError
from asyncspec.trace.file import TraceWriter
from asyncspec_nodes.client.client import Client
from asyncspec_protocol.messages import Events

FINISH_SECONDS = 10.0
"""Time for the last events to arrive after the end."""


class TraceDownload:
    """``async with``: inside, the cluster's events go to the file.

    Leaving waits for the last events and closes the file. ``complete`` is False where they did not
    arrive. A failed write is raised only then, so that it does not stop the run. ``tokens``: with
    what all users ask and are told.
    """

    def __init__(
        self, client: Client, writer: TraceWriter, *, last: float, tokens: bool = True
    ) -> None:
        self._tokens = tokens
        self._client = client
        self._writer = writer
        self._last = last
        self._done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._write_error: UserError | None = None
        self.complete = False
        self.lines = 0

    async def __aenter__(self) -> TraceDownload:
        # A recording of the past may be empty; an existing file is then kept.
        if self._last <= 0:
            self._writer.begin()
        self._number = self._client.collect(self._last, self._take, tokens=self._tokens)
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._client.stop_collecting(self._number)
            waiting = (self._done, self._client.link.gone)
            await asyncio.wait(waiting, timeout=FINISH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        self._client.drop_collection(self._number)
        self._writer.close()
        if self._write_error is not None and kind is None:
            raise self._write_error
        if self._done.done():
            if reason := self._done.result():
                raise ClusterError(f"the cluster gives no trace: {reason}")
            self.complete = True

    def _take(self, events: Events, data: memoryview | None) -> None:
        if data is not None and self._write_error is None:
            try:
                self._writer.write(data)
                self.lines += bytes(data).count(b"\n")
            except UserError as error:
                self._write_error = error
        if events.done and not self._done.done():
            self._done.set_result(events.reason)
