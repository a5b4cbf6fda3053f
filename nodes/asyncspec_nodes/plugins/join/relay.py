"""A TCP relay between two machines of a cluster that cannot reach each other. Bytes pass unread:
TLS is between the nodes, whose keys it does not have."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from asyncspec.actor.mesh import Address
from asyncspec.actor.tcp import keep_alive, stop_listening
from asyncspec_nodes.plugins.join.connection import unmapped

MOST_CONNECTIONS = 4
"""At a time: the link, and earlier ones whose end has not been seen."""

CONNECT_SECONDS = 5.0
"""For the target to accept: the dialling node gives up after ten."""

STALL_SECONDS = 30.0
"""For a side to take bytes, and for the second side to end after the first."""

BUFFER_BYTES = 1 << 18
"""Bytes held for each direction; the sender waits beyond."""


class Relay:
    """Carries connections that one machine opens to one node, from ``start`` to ``close``."""

    def __init__(
        self,
        source: Callable[[], str],
        target: Callable[[], Address | None],
        limit: int = MOST_CONNECTIONS,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """``source``: the address that connections may come from now; ``target``: where they lead
        now, None: nowhere. Of others, and of more than ``limit`` at a time, each is closed at
        once."""
        self._source = source
        self._target = target
        self._limit = limit
        self._stall_seconds = stall_seconds
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def connections(self) -> int:
        """How many are carried now."""
        return len(self._tasks)

    async def start(self, sock: socket.socket) -> None:
        """Take connections of a listening socket, which ``close`` closes."""
        try:
            self._server = await asyncio.start_server(self._accept, sock=sock, limit=BUFFER_BYTES)
        except asyncio.CancelledError:
            sock.close()
            raise

    async def close(self) -> None:
        """Stop listening, and end what is carried."""
        if self._server is not None:
            await stop_listening(self._server)
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        target = self._target()
        is_allowed = peer is not None and unmapped(peer[0]) == self._source()
        if target is None or not is_allowed or len(self._tasks) >= self._limit:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._carry(reader, writer, target))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: Address
    ) -> None:
        writers = [writer]
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                back, onward = await asyncio.open_connection(*target, limit=BUFFER_BYTES)
            writers.append(onward)
            for end in writers:
                keep_alive(end.transport)
            await self._pump_both((reader, onward), (back, writer))
        except* OSError:  # also where it took too long: the dialling node tries again
            pass
        finally:
            for end in writers:
                end.transport.abort()

    async def _pump_both(self, *ways: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        """To the end of both directions. Raises a group of ``OSError`` where one fails."""
        async with asyncio.TaskGroup() as group:
            pumps = [group.create_task(self._pump(*way)) for way in ways]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            async with asyncio.timeout(self._stall_seconds):
                await asyncio.wait(pumps)
                for _, writer in ways:
                    writer.close()  # once all is sent
                    await writer.wait_closed()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(BUFFER_BYTES):
            writer.write(piece)
            async with asyncio.timeout(self._stall_seconds):
                await writer.drain()
        writer.write_eof()
