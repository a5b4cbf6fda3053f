"""Which requests a service accepts: by host name and by the page's origin."""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Iterable

from aiohttp import web
from msgspec import Struct

from asyncspec.core.errors import UserError
from asyncspec_nodes.console.hosts import address, is_loopback
from asyncspec_nodes.http.api.errors import ApiError
from asyncspec_nodes.http.keys import ApiKeys
from asyncspec_nodes.http.limits import Limits

ANY = "*"
_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_PORT = re.compile(r"(:[0-9]*)?")


class AllowedHosts(Struct, frozen=True):
    """Host names that the service accepts, against DNS rebinding: a page on an attacker's domain
    that resolves to this machine's address has the service's origin as far as the browser is
    concerned, but its requests still carry that domain in ``Host``. Addresses cannot be rebound."""

    # Lower-case host names and addresses.
    names: Collection[str] = ()
    # Accept any address, or any name.
    addresses: bool = False
    every: bool = False

    def check(self, header: str | None) -> None:
        """Checks ``Host``. A request without one comes from no browser. Raises ``ApiError``."""
        if self.every or header is None:
            return
        name = _host_name(header)
        if name is None:
            raise ApiError(421, "the Host header is no host name and no address", code="no_host")
        if name in self.names or is_loopback(name) or name.endswith(".localhost"):
            return
        if self.addresses and address(name):
            return
        raise ApiError(
            421,
            f"this service does not answer to the name {name}; if that is its name, start it with "
            f"--allow-host {name}",
            code="unknown_host",
        )


def _host_name(header: str) -> str | None:
    """Lower-case name or address of a ``Host`` header, without the port; None if malformed."""
    if header.startswith("["):
        name, bracket, port = header[1:].partition("]")
        valid = bool(bracket) and ":" in name and address(name) is not None
    else:
        name, colon, digits = header.partition(":")
        name, port = name.lower().removesuffix("."), colon + digits
        valid = _NAME.fullmatch(name) is not None
    return name if valid and _PORT.fullmatch(port) else None


def read_hosts(bound: str, allowed: Iterable[str], *, keys: bool = False) -> AllowedHosts:
    """Hosts of a service bound to ``bound``; ``allowed``: further names (``--allow-host``).
    ``keys``: whether the service requires API keys. Raises ``UserError``.

    On loopback only loopback's names are accepted. Elsewhere any address and the machine's name
    are; with keys any name, because a rebound page has no key.
    """
    names = []
    for text in allowed:
        name = text.lower().removesuffix(".")
        if text != ANY and not _NAME.fullmatch(name) and not address(name):
            raise UserError(
                f"--allow-host is {text}; it must be a host name or an address, without a port, "
                f"or {ANY}"
            )
        names.append(name)
    if ANY in names or (keys and not is_loopback(bound)):
        return AllowedHosts(every=True)
    if is_loopback(bound):
        return AllowedHosts(names)
    return AllowedHosts([*names, bound.lower(), socket.gethostname().lower()], addresses=True)


PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST",
    # "*" never includes Authorization; it allows the headers that client libraries add.
    "Access-Control-Allow-Headers": "Authorization, Content-Type, *",
    "Access-Control-Max-Age": "600",
}
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[^\s/?#@:*\[\]]+)(:[0-9]{1,5})?")


class AllowedOrigins(Struct, frozen=True):
    """Origins whose pages may use the service from a browser, as browsers write them; ``*`` is all.

    A preflight carries no key, so its answer is the same for every path."""

    allowed: Collection[str] = ()

    def preflight(self, request: web.Request) -> web.Response | None:
        """The response to a preflight from an allowed origin; None for any other request."""
        asks = "Access-Control-Request-Method" in request.headers
        if request.method != "OPTIONS" or not asks or self._allowed_origin(request) is None:
            return None
        return web.Response(status=204, headers=PREFLIGHT)

    def check(self, request: web.Request) -> None:
        """Raises ``ApiError`` for a request with effects from a page of a foreign origin."""
        origin = request.headers.get("Origin")
        if origin is None or request.method in _SAFE or self._allowed_origin(request) is not None:
            return
        # Behind a proxy that rewrites Host, only this header tells.
        if request.headers.get("Sec-Fetch-Site") == "same-origin":
            return
        _, scheme, host = origin.lower().partition("://")
        if scheme and host == request.headers.get("Host", "").lower():
            return
        raise ApiError(
            403,
            f"pages of the origin {origin} may not use this service; if they are to, start it with "
            f"--allow-origin {origin}",
            code="foreign_origin",
        )

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """CORS headers of any response."""
        if self.allowed and ANY not in self.allowed:
            response.headers["Vary"] = "Origin"
        if (origin := self._allowed_origin(request)) is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = "Retry-After"

    def _allowed_origin(self, request: web.Request) -> str | None:
        if ANY in self.allowed:
            return ANY
        origin = request.headers.get("Origin")
        return origin if origin in self.allowed else None


def read_origins(allowed: Iterable[str]) -> AllowedOrigins:
    """Normalises ``--allow-origin``: lower case, no default port. Raises ``UserError``."""
    origins = []
    for text in allowed:
        origin = text.lower()
        parts = _ORIGIN.fullmatch(origin)
        if parts is None and origin != ANY:
            raise UserError(
                f"--allow-origin is {text}; it must be SCHEME://HOST or SCHEME://HOST:PORT, "
                f"without a path, or {ANY}"
            )
        origins.append(origin.removesuffix(_DEFAULT_PORTS.get(parts[1], "") if parts else ""))
    return AllowedOrigins(frozenset(origins))


class ServiceOptions(Struct, frozen=True):
    """Access and limits of a service."""

    keys: ApiKeys = ApiKeys()
    hosts: AllowedHosts = AllowedHosts()
    origins: AllowedOrigins = AllowedOrigins()
    limits: Limits = Limits()
    # Answer ``/metrics`` without a key.
    public_metrics: bool = False
