"""Ports of loopback for processes that are started by a benchmark or a test."""

from __future__ import annotations

import contextlib
import socket

from tools.testbed.state import directory, locked

LOWEST, HIGHEST = 20_000, 32_000
"""Below the ports that systems give to outgoing connections (Linux: from 32,768 on), any of which
could take a port between the moment it is found free and the moment it is used."""


def free_ports(count: int) -> list[int]:
    """Different ports on which nobody listens. Processes of one user beside each other are given
    different ones, in turn: who is given a port listens there only later."""
    found: list[int] = []
    with locked(), contextlib.ExitStack() as stack:
        file = directory() / "port"
        text = file.read_text() if file.exists() else ""
        last = int(text) if text.isdecimal() else 0
        while len(found) < count:
            last = (last + 1) % (HIGHEST - LOWEST)
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", LOWEST + last)))
                found.append(LOWEST + last)
        file.write_text(str(last))
    return found


def free_port() -> int:
    """One."""
    return free_ports(1)[0]
