"""The proxy: forwards connections with latency, jitter and, where it must, a rate.

It runs on asyncio's own loop with ``select``: the other selectors, and uvloop, know timers by whole
milliseconds only, ``select`` by microseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import signal
import socket
import sys
from functools import partial
from typing import cast

import msgspec

from tools.testbed.pipe import Pipe, reset
from tools.testbed.routes import Direction, Orders, Route
from tools.testbed.schedule import Schedule, Serial

REDIAL_SECONDS = 0.02
BACKLOG = 64
NICE = -15


class Side(asyncio.Protocol):
    """One of the two transports of a forwarded connection: what it says goes ``away``, what it is
    told comes ``back``."""

    def __init__(self, away: Pipe, back: Pipe) -> None:
        self.transport: asyncio.Transport | None = None
        self.silent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._away = away
        self._back = back

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio``."""
        self.transport = cast(asyncio.Transport, transport)
        self._away.source(self.transport)
        self._back.sink(self.transport)

    def data_received(self, data: bytes) -> None:
        """See ``asyncio``."""
        self._away.feed(data)

    def eof_received(self) -> bool:
        """The other way stays open."""
        self._away.end("eof")
        self._says_no_more()
        return True

    def pause_writing(self) -> None:
        """See ``asyncio``."""
        self._back.sink_full(True)

    def resume_writing(self) -> None:
        """See ``asyncio``."""
        self._back.sink_full(False)

    def connection_lost(self, error: Exception | None) -> None:
        """See ``asyncio``: with an error it was reset, else we have closed it."""
        self._back.sink_gone()
        if error is not None:
            self._away.end("reset")
        self._says_no_more()

    def _says_no_more(self) -> None:
        if not self.silent.done():
            self.silent.set_result(None)


class Forward:
    """One forwarded connection, from its acceptance on."""

    def __init__(self, route: Route, serials: dict[str, Serial], number: int) -> None:
        there = self._pipe(route.forward, serials, number)
        here = self._pipe(route.backward, serials, number)
        self.near = Side(away=there, back=here)
        self._far = Side(away=here, back=there)
        self._pipes = (there, here)
        self._route = route

    def _pipe(self, direction: Direction, serials: dict[str, Serial], number: int) -> Pipe:
        schedule = Schedule(
            direction.latency_seconds,
            direction.jitter_seconds,
            direction.seed * 65_537 + number,
            [serials[name] for name in direction.serials],
        )
        return Pipe(schedule, direction.room, self._ended, asyncio.get_running_loop())

    async def dial(self) -> None:
        """Connect to where the route leads. Nobody listens there yet: try again while the dialler
        waits, as a network does that loses the first packets."""
        loop = asyncio.get_running_loop()
        while True:
            sock = _socket(reads=self._route.backward, writes=self._route.forward)
            try:
                await loop.sock_connect(sock, self._route.connect)
                await loop.create_connection(lambda: self._far, sock=sock)
                return
            except OSError:
                sock.close()
            if self.near.silent.done():
                break  # nobody is to be reached, and the dialler has hung up
            await asyncio.wait((self.near.silent,), timeout=REDIAL_SECONDS)
        if self.near.transport is not None:
            reset(self.near.transport)

    def _ended(self) -> None:
        """Both ways have come to their end: close both sides, with what they still have to send."""
        if all(pipe.ended for pipe in self._pipes):
            for side in (self.near, self._far):
                if side.transport is not None:
                    side.transport.close()


class Proxy:
    """All routes of a bed."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._serials = {name: Serial(mbit) for name, mbit in orders.serials.items()}
        self._number = 0
        self._dials: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen on every route's address. Raises ``OSError``."""
        for route in self._orders.routes:
            sock = _socket(reads=route.forward, writes=route.backward)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(route.listen)
            accept = partial(self._accept, route)
            await asyncio.get_running_loop().create_server(accept, sock=sock, backlog=BACKLOG)

    def _accept(self, route: Route) -> Side:
        self._number += 1
        forward = Forward(route, self._serials, self._number)
        task = asyncio.get_running_loop().create_task(forward.dial())
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)
        return forward.near


def _socket(reads: Direction, writes: Direction) -> socket.socket:
    """A socket for bytes that go on one way and come back another; what it accepts is like it."""
    # Named so, TCP is known to asyncio, which switches Nagle's delays off.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, reads.buffer)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, writes.buffer)
    return sock


async def _serve(orders: Orders) -> None:
    """Until standard input ends: then the process that started us is gone."""
    await Proxy(orders).start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), over.set)
    await over.wait()


def loop_factory() -> asyncio.AbstractEventLoop:
    """The loop with precise timers."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


def main() -> int:
    """The process: orders as one line of JSON on standard input, "ready" on standard output."""
    # Ctrl-C in the terminal reaches all processes; only the bed's owner acts on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(PermissionError):
        # The network must not wait for a processor that the devices are busy with.
        os.nice(NICE)
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=Orders)
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(_serve(orders))
    return 0
