"""Ports for processes that tests start."""

from __future__ import annotations

import contextlib
import secrets
import socket

LOWEST, HIGHEST = 20_000, 32_000
"""Below the ports that systems give to outgoing connections (Linux: from 32,768 on), any of which
could take a port between the moment it is found free and the moment it is used."""


def free_port() -> int:
    """A port of loopback on which nobody listens."""
    while True:
        port = LOWEST + secrets.randbelow(HIGHEST - LOWEST)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
