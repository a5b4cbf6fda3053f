"""Pages of other origins that may use the service from a browser (CORS)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from aiohttp import web

from asyncspec.errors import UserError

EVERY = "*"
PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST",
    # The star, which never means Authorization, is for what clients say of themselves.
    "Access-Control-Allow-Headers": "Authorization, Content-Type, *",
    "Access-Control-Max-Age": "600",
}
_DEFAULT_PORTS = (("http://", ":80"), ("https://", ":443"))
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/?#@:*\[\]]+)(:[0-9]{1,5})?")


class Origins:
    """``allowed``: they, as browsers write them; ``*`` is all.

    Law of this class: a preflight, which brings no key, is answered alike for every path."""

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self.allowed = frozenset(allowed)

    def preflight(self, request: web.Request) -> web.Response | None:
        """The answer to a browser that asks whether it may ask; None: to anything else, and to an
        origin that may not."""
        asks = "Access-Control-Request-Method" in request.headers
        if request.method != "OPTIONS" or not asks or self._answer(request) is None:
            return None
        return web.Response(status=204, headers=PREFLIGHT)

    async def sign(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let the browser give the answer, of any kind, to the page that has asked."""
        if self.allowed and EVERY not in self.allowed:
            response.headers["Vary"] = "Origin"
        if (origin := self._answer(request)) is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = "Retry-After"

    def _answer(self, request: web.Request) -> str | None:
        if EVERY in self.allowed:
            return EVERY
        origin = request.headers.get("Origin")
        return origin if origin in self.allowed else None


def read_origins(given: Iterable[str]) -> Origins:
    """As browsers write them: in lower case, without the default port. Raises ``UserError``."""
    return Origins([one if one == EVERY else _origin(one) for one in given])


def _origin(given: str) -> str:
    origin = given.lower()
    if not _ORIGIN.fullmatch(origin):
        raise UserError(
            f"--allow-origin is {given}; it must be SCHEME://HOST or SCHEME://HOST:PORT, without a "
            f"path, or {EVERY}"
        )
    for scheme, port in _DEFAULT_PORTS:
        if origin.startswith(scheme):
            origin = origin.removesuffix(port)
    return origin
