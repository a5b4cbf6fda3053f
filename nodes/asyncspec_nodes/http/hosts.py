"""Host names that the service accepts, against DNS rebinding.

A page on an attacker's domain that resolves to this machine's address has the service's origin as
far as the browser is concerned. Its requests still carry that domain in ``Host``, so unknown names
are refused. IP addresses cannot be rebound.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable

from asyncspec.core.errors import UserError
from asyncspec_nodes.console.hosts import is_loopback
from asyncspec_nodes.http.api.errors import ApiError

ANY = "*"
_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_PORT = re.compile(r"(:[0-9]*)?")


class AllowedHosts:
    """``names``: lower-case host names and addresses; ``addresses``: accept any address; ``every``:
    accept any name."""

    def __init__(
        self, names: Iterable[str] = (), *, addresses: bool = False, every: bool = False
    ) -> None:
        self._names = frozenset(names)
        self._addresses = addresses
        self._every = every

    def check(self, header: str | None) -> None:
        """Checks ``Host``. A request without one comes from no browser. Raises ``ApiError``."""
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
    """Lower-case name or address of a ``Host`` header, without the port; None if malformed."""
    if header.startswith("["):
        name, bracket, port = header[1:].partition("]")
        fine = bool(bracket) and _is_address(name) and ":" in name
    else:
        name, colon, digits = header.partition(":")
        name, port = name.lower().removesuffix("."), colon + digits
        fine = _NAME.fullmatch(name) is not None
    return name if fine and _PORT.fullmatch(port) else None


def read_hosts(bound: str, allowed: Iterable[str], *, keys: bool = False) -> AllowedHosts:
    """Hosts of a service bound to ``bound``; ``allowed``: further names (``--allow-host``).
    ``keys``: whether the service requires API keys. Raises ``UserError``.

    On loopback only loopback's names are accepted. Elsewhere any address and the machine's name
    are; with keys any name, because a rebound page has no key.
    """
    names = [_allowed(one) for one in allowed]
    if ANY in names or (keys and not is_loopback(bound)):
        return AllowedHosts(every=True)
    if is_loopback(bound):
        return AllowedHosts(names)
    names += [bound.lower(), socket.gethostname().lower()]
    return AllowedHosts(names, addresses=True)


def _allowed(given: str) -> str:
    if given == ANY:
        return ANY
    name = given.lower().removesuffix(".")
    if _NAME.fullmatch(name) or _is_address(name):
        return name
    raise UserError(
        f"--allow-host is {given}; it must be a host name or an address, without a port, or {ANY}"
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
