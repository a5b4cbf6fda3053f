"""Listening sockets, bound before anything is loaded so that a taken port fails at once."""

from __future__ import annotations

import errno
import socket

from asyncspec.core.errors import AddressError, UserError
from asyncspec_nodes.console.hosts import is_host

BACKLOG = 128  # connections that wait to be accepted


def bind(host: str, port: int, *, whose: str) -> socket.socket:
    """Listen on an address; on ``::`` also for IPv4, where the system can. ``whose``: the node or
    options that name it. Raises ``UserError``; ``AddressError`` where the network does not have the
    address or the name, as while a machine starts: supervisors then try again."""
    if not is_host(host):
        raise UserError(f"{host} ({whose}) is no host name and no address")
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        both = address[0] == "::" and socket.has_dualstack_ipv6()
        sock = socket.create_server(
            address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=both
        )
    except socket.gaierror as error:
        raise AddressError(f"{host} ({whose}) cannot be resolved: {error.strerror}") from None
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise AddressError(
                f"cannot listen on {host}:{port}: this machine does not have that address; "
                f"correct the host of {whose}"
            ) from None
        advice = f"{error.strerror}; change the port of {whose}"
        if error.errno == errno.EADDRINUSE:
            advice = f"the port is in use; stop what listens there or change the port of {whose}"
        raise UserError(f"cannot listen on {host}:{port}: {advice}") from None
    sock.setblocking(False)
    return sock


def inherited(descriptor: int) -> socket.socket:
    """The inherited listening socket ``descriptor``. Raises ``UserError``."""
    try:
        sock = socket.socket(fileno=descriptor)
        sock.getsockname()
    except OSError as error:
        raise UserError(f"--listen-fd {descriptor} is no socket: {error.strerror}") from None
    sock.setblocking(False)
    return sock


def loopback() -> socket.socket:
    """A socket that listens on a free port of this machine, for a child to inherit."""
    return socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
