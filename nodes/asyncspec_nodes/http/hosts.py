"""Names under which the service answers (DNS rebinding).

A page whose author points its own name at this machine's address is, to a browser, a page of this
service: it may read every answer. Its requests still bear its name in ``Host``. So a name that
nobody has given to this service is refused. An address is no name that could be pointed elsewhere.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable

from asyncspec.core.errors import UserError
from asyncspec_nodes.console.hosts import is_loopback
from asyncspec_nodes.http.api.errors import ApiError

EVERY = "*"
_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_PORT = re.compile(r"(:[0-9]*)?")


class Hosts:
    """``names``: of hosts, lower case, and addresses; ``addresses``: whether any address will do;
    ``every``: whether any name will."""

    def __init__(
        self, names: Iterable[str] = (), *, addresses: bool = False, every: bool = False
    ) -> None:
        self._names = frozenset(names)
        self._addresses = addresses
        self._every = every

    def check(self, header: str | None) -> None:
        """``Host`` of a request; None where it has none, as no browser's is. Raises
        ``ApiError``."""
        if self._every or header is None:
            return
        name = name_of(header)
        if name is None:
            raise ApiError(421, "the Host header is no host name and no address", code="no_host")
        if name in self._names or is_loopback(name) or name.endswith(".localhost"):
            return
        if self._addresses and _is_address(name):
            return
        raise ApiError(
            421,
            f"this service does not answer to the name {name}; if that is its name, start it with "
            f"--allow-host {name}",
            code="unknown_host",
        )


def name_of(header: str) -> str | None:
    """The host's name, lower case, or its address, without the port; None where there is none."""
    if header.startswith("["):
        name, bracket, port = header[1:].partition("]")
        fine = bool(bracket) and _is_address(name) and ":" in name
    else:
        name, colon, digits = header.partition(":")
        name, port = name.lower().removesuffix("."), colon + digits
        fine = _NAME.fullmatch(name) is not None
    return name if fine and _PORT.fullmatch(port) else None


def read_hosts(bound: str, allowed: Iterable[str], *, keys: bool = False) -> Hosts:
    """Of a service on the address or name ``bound``; its operator has allowed further names.
    ``keys``: whether it wants an API key. Raises ``UserError``.

    On loopback loopback's names are its only ones. Beyond it the service has addresses, its
    machine's name, and others that only a user knows: with keys any name will do, as a page that
    was rebound has none.
    """
    names = [_allowed(one) for one in allowed]
    if EVERY in names or (keys and not is_loopback(bound)):
        return Hosts(every=True)
    if is_loopback(bound):
        return Hosts(names)
    names += [bound.lower(), socket.gethostname().lower()]
    return Hosts(names, addresses=True)


def _allowed(given: str) -> str:
    if given == EVERY:
        return EVERY
    name = given.lower().removesuffix(".")
    if _NAME.fullmatch(name) or _is_address(name):
        return name
    raise UserError(
        f"--allow-host is {given}; it must be a host name or an address, without a port, or {EVERY}"
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
