"""What the kernel knows of a TCP connection, its options, and the end of listening."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys

from asyncspec.actor.silence import PathState

KEEP_IDLE, KEEP_INTERVAL, KEEP_PROBES = 5, 1, 5
"""Seconds without data until the kernel asks the peer's, seconds between, and how often: a machine
that is lost during a handshake, without heartbeats, is known after ten seconds."""

_TCP_INFO = struct.Struct("=24xI28xI8x2I72xI")
"""Linux's ``struct tcp_info``: unacked, last_ack_recv (ms), rtt, rttvar, min_rtt (us)."""


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


async def stop_listening(server: asyncio.Server) -> None:
    """Close a server. Connections that the event loop has accepted get their protocols before:
    asyncio (3.11 to 3.13) would leave those of its last iteration open and without an owner."""
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
    unacked, last_ack, rtt, rttvar, least = _TCP_INFO.unpack(raw)
    return PathState(unacked > 0, last_ack * 1e-3, rtt * 1e-6, rttvar * 1e-6, least * 1e-6)
