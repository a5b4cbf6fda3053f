"""Ports of loopback for processes that are started by a benchmark or a test."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator

from tools.testbed.state import directory

LOWEST, HIGHEST = 20_000, 32_000
"""Below the ports that systems give to outgoing connections (Linux: from 32,768 on), any of which
could take a port between the moment it is found free and the moment it is used."""


def free_ports(count: int) -> list[int]:
    """Different ports on which nobody listens. Processes of one user beside each other are given
    different ones, in turn: who is given a port listens there only later."""
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        ports = stack.enter_context(_turn())
        while len(found) < count:
            port = next(ports)
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
    return found


@contextlib.contextmanager
def _turn() -> Iterator[Iterator[int]]:
    """The ports, from the one behind the last that any process was given; meanwhile others wait."""
    descriptor = os.open(directory() / "ports", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        last = file.read()
        taken = int(last) if last.isdecimal() else 0

        def ports() -> Iterator[int]:
            nonlocal taken
            while True:
                taken += 1
                yield LOWEST + taken % (HIGHEST - LOWEST)

        try:
            yield ports()
        finally:
            file.seek(0)
            file.truncate()
            file.write(str(taken))


def free_port() -> int:
    """One."""
    return free_ports(1)[0]
