"""One direction of a forwarded connection: bytes wait for their release, in order."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Literal

from tools.testbed.schedule import Schedule

PIECE = 16_384
"""Bytes that pass a slow line together: at 20 Mbit/s 7 ms."""

LEAD_SECONDS = 0.000_12
"""The kernel wakes a sleeper 40 to 120 microseconds late (measured), so it is told a time as much
before; what is left then is spent awake."""

End = Literal["eof", "reset"]


class Pipe:
    """Takes bytes and the end of one transport, gives them to another when their time has come.

    The room is what may be on the way. When it is full the source is not read, so its sender's
    socket fills up and it waits, as before a full network; so it is when the sink does not read.
    """

    def __init__(
        self,
        schedule: Schedule,
        room: int,
        ended: Callable[[], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """``ended`` is called when the end of the bytes has been passed on."""
        self.ended = False
        self._schedule = schedule
        self._room = room
        self._tell_ended = ended
        self._loop = loop
        self._waiting: deque[tuple[float, memoryview | End]] = deque()
        self._size = 0
        self._timer: asyncio.TimerHandle | None = None
        self._source: asyncio.Transport | None = None
        self._source_paused = False
        self._sink: asyncio.Transport | None = None
        self._sink_full = False
        self._sink_gone = False

    def source(self, transport: asyncio.Transport) -> None:
        """Bytes come from there."""
        self._source = transport

    def sink(self, transport: asyncio.Transport) -> None:
        """Bytes go there, from now on."""
        self._sink = transport
        self._arm()

    def sink_full(self, full: bool) -> None:
        """The sink cannot take more, or can again."""
        self._sink_full = full
        self._arm()

    def sink_gone(self) -> None:
        """The reader is gone."""
        self._sink_gone = True
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()

    def feed(self, data: bytes) -> None:
        """Bytes have come."""
        if self._sink_gone:
            return
        now, view = self._loop.time(), memoryview(data)
        for start in range(0, len(data), PIECE):
            piece = view[start : start + PIECE]
            self._waiting.append((self._schedule.release(now, len(piece)), piece))
        self._size += len(data)
        if self._size >= self._room and self._source is not None and not self._source_paused:
            self._source_paused = True
            self._source.pause_reading()
        self._arm()

    def end(self, how: End) -> None:
        """The source says no more; not even a reset overtakes what it has said."""
        if not self._sink_gone:
            self._waiting.append((self._schedule.release(self._loop.time(), 0), how))
            self._arm()

    def _arm(self) -> None:
        if self._timer is None and self._waiting and self._sink is not None and not self._sink_full:
            at = self._waiting[0][0] - LEAD_SECONDS
            self._timer = self._loop.call_at(at, self._due, self._sink)

    def _due(self, sink: asyncio.Transport) -> None:
        self._timer = None
        while (now := self._loop.time()) < self._waiting[0][0]:
            pass  # no longer than LEAD_SECONDS
        pieces: list[memoryview] = []
        how: End | None = None
        while how is None and self._waiting and self._waiting[0][0] <= now:
            _, item = self._waiting.popleft()
            if isinstance(item, str):
                how = item
            else:
                pieces.append(item)
                self._size -= len(item)
        if pieces:
            # Before Python 3.13.2 ``writelines`` never pauses the protocol (CVE-2024-12254).
            sink.write(b"".join(pieces))
        if how is not None:
            self._finish(sink, how)
        if self._source_paused and self._size < self._room and self._source is not None:
            self._source_paused = False
            self._source.resume_reading()
        self._arm()

    def _finish(self, sink: asyncio.Transport, how: End) -> None:
        self.ended = True
        if how == "reset":
            reset(sink)
        elif not sink.is_closing():
            sink.write_eof()
        self._tell_ended()


def reset(transport: asyncio.Transport) -> None:
    """Close with a TCP reset."""
    sock = transport.get_extra_info("socket")
    if sock is not None and not transport.is_closing():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
