"""What the kernel knows of a TCP connection, its options, and the end of listening."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from asyncspec.actor.silence import PathState

KEEP_IDLE, KEEP_INTERVAL, KEEP_PROBES = 5, 1, 5
"""Seconds without data until the kernel asks the peer's, seconds between, and how often: a machine
that is lost during a handshake, without heartbeats, is known after ten seconds."""

RETRY_SECONDS = 0.1
"""Pause where a connection cannot be accepted, as with no descriptor left."""

P = TypeVar("P", bound=asyncio.BaseProtocol)

_TCP_INFO = struct.Struct("=24xI28xI")
"""Begin of Linux's ``struct tcp_info``: unacked, last_ack_recv (ms)."""


def keep_alive(transport: asyncio.BaseTransport) -> None:
    """Let the kernel probe an idle connection."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_IDLE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEP_INTERVAL)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEP_PROBES)


def end_unacknowledged(sock: socket.socket | None, seconds: float) -> None:
    """Let the kernel end a connection when what was sent is not acknowledged, or not read, for so
    long; without an effect where the system has no such limit, or the connection is over."""
    if sys.platform == "linux" and sock is not None and sock.fileno() >= 0:
        milliseconds = round(1000 * seconds)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


class TlsListener(Generic[P]):
    """Accepts connections and agrees on TLS with them. Event loops' own servers do so with any
    number at a time, each with its buffers, and a protocol cannot close its connection before."""

    def __init__(
        self,
        sock: socket.socket,
        tls: ssl.SSLContext,
        accept: Callable[[], P | None],
        failed: Callable[[P], None] = lambda protocol: None,
        *,
        handshake_seconds: float,
    ) -> None:
        """Listens until ``close``. ``accept``: the protocol of one more connection, or None to
        close that at once. ``failed``: there is no TLS
        with the peer of a protocol, of which ``connection_made`` is not called."""
        self._sock = sock
        self._tls = tls
        self._accept = accept
        self._failed = failed
        self._seconds = handshake_seconds
        self._loop = asyncio.get_running_loop()
        self._handshakes: dict[P, asyncio.Task[None]] = {}
        self._accepting = self._loop.create_task(self._accept_all())

    def close(self) -> None:
        """Stop listening."""
        self._accepting.cancel()

    def drop(self, protocol: P) -> None:
        """Close the connection of a protocol that has no TLS with its peer yet."""
        if (handshake := self._handshakes.get(protocol)) is not None:
            handshake.cancel()

    async def wait_closed(self) -> None:
        """After ``close``: end the handshakes under way."""
        await asyncio.sleep(0)  # what was accepted just now gets its transport
        tasks = tuple(self._handshakes.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(self._accepting, *tasks, return_exceptions=True)
        self._sock.close()

    async def _accept_all(self) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._sock)
            except OSError:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            protocol = self._accept()
            if protocol is None:
                connection.close()
            else:
                task = self._loop.create_task(self._agree(connection, protocol))
                self._handshakes[protocol] = task
                task.add_done_callback(partial(self._agreed, protocol))
            await asyncio.sleep(0)  # not every accept waits

    def _agreed(self, protocol: P, task: asyncio.Task[None]) -> None:
        del self._handshakes[protocol]

    async def _agree(self, connection: socket.socket, protocol: P) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._tls, ssl_handshake_timeout=self._seconds
            )
        except OSError:  # also where it took too long
            self._failed(protocol)
        except asyncio.CancelledError:
            connection.close()  # where the handshake had not begun
            raise


async def stop_listening(server: asyncio.Server | TlsListener[Any]) -> None:
    """Close a server. Connections that the event loop has accepted get their protocols before:
    asyncio (3.11 to 3.13) would leave those of its last iteration open and without an owner."""
    if isinstance(server, TlsListener):
        server.close()
        await server.wait_closed()
        return
    loop = asyncio.get_running_loop()
    for sock in server.sockets:
        loop.remove_reader(sock.fileno())
    for _ in range(2):  # the transport, then ``connection_made``
        await asyncio.sleep(0)
    server.close()


def path_state(transport: asyncio.BaseTransport | None) -> PathState | None:
    """The state of a connection now; None where the system does not say."""
    sock = None if transport is None else transport.get_extra_info("socket")
    if sys.platform != "linux" or sock is None:
        return None
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:  # it is being closed
        return None
    if len(raw) < _TCP_INFO.size:
        return None
    unacked, last_ack = _TCP_INFO.unpack(raw)
    return PathState(unacked > 0, last_ack * 1e-3)
