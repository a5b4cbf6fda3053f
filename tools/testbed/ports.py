"""Ports of loopback for processes that are started by a benchmark or a test."""

from __future__ import annotations

import contextlib
import secrets
import socket

LOWEST, HIGHEST = 20_000, 32_000
"""Below the ports that systems give to outgoing connections (Linux: from 32,768 on), any of which
could take a port between the moment it is found free and the moment it is used."""


def free_ports(count: int) -> list[int]:
    """Different ports on which nobody listens."""
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            port = LOWEST + secrets.randbelow(HIGHEST - LOWEST)
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
    return found


def free_port() -> int:
    """One."""
    return free_ports(1)[0]
