"""Pages of other origins that may use the service from a browser (CORS)."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

import msgspec
from aiohttp import ClientConnectionError, web
from aiohttp.typedefs import Handler, Middleware

from asyncspec.core.errors import UserError
from asyncspec_nodes.http import site
from asyncspec_nodes.http.api.errors import ApiError, invalid
from asyncspec_nodes.http.hosts import Hosts
from asyncspec_nodes.http.limits import Limits
from asyncspec_nodes.http.metrics import Metrics

EVERY = "*"
PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST",
    # The star, which never means Authorization, is for what clients say of themselves.
    "Access-Control-Allow-Headers": "Authorization, Content-Type, *",
    "Access-Control-Max-Age": "600",
}
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
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

    def check(self, request: web.Request) -> None:
        """A request that changes something comes from no page, from this service's own one, or from
        one of an origin that may. Raises ``ApiError``."""
        origin = request.headers.get("Origin")
        if origin is None or request.method in _SAFE or self._answer(request) is not None:
            return
        # A browser says so itself where a proxy has put another name in Host.
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


# --- API keys.

VARIABLE = "ASYNCSPEC_API_KEY"
_COMMENT = re.compile(r"(^|\s)#.*")


class Keys:
    """The keys that open the service; without any it is open to whoever reaches it.
    ``share_prefixes``: requests of all keys share prompt prefixes, as those without keys do."""

    def __init__(self, keys: Iterable[str] = (), *, share_prefixes: bool = False) -> None:
        self._digests = tuple(map(_digest, keys))
        self._share_prefixes = share_prefixes

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, header: str | None) -> str:
        """The tenant of a request with this ``Authorization``: see ``Submit.tenant``. Raises
        ``ApiError``."""
        if not self._digests:
            return ""
        scheme, _, key = (header or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise ApiError(
                401, "there is no API key; send Authorization: Bearer KEY", code="missing_api_key"
            )
        given = _digest(key.strip())
        # Every key is compared to the end: how long it takes says nothing.
        same = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(same):
            raise ApiError(401, "the API key is not one of this service", code="invalid_api_key")
        return "" if self._share_prefixes else _tenant(given)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _tenant(digest: bytes) -> str:
    """Another hash of the key: it names its tenant, and does not open the service."""
    return hmac.digest(digest, b"asyncspec tenant", "sha256")[:16].hex()


def read_keys(file: Path | None, *, share_prefixes: bool = False) -> Keys:
    """The keys in a file, one a line, # at its beginning or behind a space begins a comment; else
    the environment's. Raises ``UserError``."""
    if file is None:
        key = os.environ.get(VARIABLE, "").strip()
        return Keys([key] if key else [], share_prefixes=share_prefixes)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"cannot read the API keys in {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"the API keys in {file} are not UTF-8 text") from None
    keys = [key for line in lines if (key := _COMMENT.sub("", line).strip())]
    if not keys:
        raise UserError(f"there is no API key in {file}; write one a line")
    return Keys(keys, share_prefixes=share_prefixes)


# --- A request's body, as it may come.


async def read_body(request: web.Request, limits: Limits) -> bytes:
    """The bytes of a JSON body. Raises ``ApiError``."""
    # Also a wall: other sites' pages can send a form here without asking, but not JSON.
    if request.content_type != "application/json":
        raise ApiError(
            415,
            f"the content type is {request.content_type}; send application/json",
            code="unsupported_media_type",
        )
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise ApiError(415, "send the body without compression", code="unsupported_media_type")
    if (request.content_length or 0) > limits.body_bytes:
        raise _too_large(limits)
    try:
        async with asyncio.timeout(limits.body_seconds):
            return await _read(request, limits)
    except TimeoutError:
        seconds = limits.body_seconds
        raise ApiError(408, f"the body did not come in {seconds:g} s", code="timeout") from None
    except (web.RequestPayloadError, ClientConnectionError, ValueError):
        text = "the body is not what its headers say: it cannot be read"
        raise invalid(text, code="invalid_http") from None


async def _read(request: web.Request, limits: Limits) -> bytes:
    parts, size = [], 0
    async for part in request.content.iter_any():
        size += len(part)
        if size > limits.body_bytes:
            raise _too_large(limits)
        parts.append(part)
    return b"".join(parts)


def _too_large(limits: Limits) -> ApiError:
    return ApiError(
        413, f"the body has more than {limits.body_bytes} bytes", code="request_too_large"
    )


# --- What every request passes: the name it was sent to, the page it comes from and its key are
# checked, and whatever goes wrong is the API's error.

CLOSED = 499
"""In the metrics: the client has left (nginx's number)."""

UNKNOWN = "unknown"
"""In the metrics: no route of this service."""

OPEN = frozenset({"/health", "/ready", *site.FILES})
"""Routes that need no key: they tell nothing of anybody's requests."""


def guarded(keys: Keys, hosts: Hosts, origins: Origins, metrics: Metrics) -> Middleware:
    """The middleware of a service."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        status, route = CLOSED, await route_of(request)
        try:
            hosts.check(request.headers.get("Host"))
            response: web.StreamResponse | None = origins.preflight(request)
            if response is None:
                origins.check(request)
                if route not in OPEN:
                    keys.check(request.headers.get("Authorization"))
                response = await handler(request)
            status = response.status
            return response
        except ApiError as error:
            status = error.status
            return response_of(error)
        except web.HTTPException as error:
            status = error.status
            return response_of(api_error(error, request))
        except ConnectionError:
            raise  # the client has left: there is nobody to tell
        except Exception:
            status = 500
            return response_of(mistake())
        finally:
            metrics.requested(route, status)

    return guard


def mistake() -> ApiError:
    """The exception that is handled, which is our own mistake, as the API's error. It is written
    down; no request's text is in it, only where it happened."""
    sys.stderr.write(traceback.format_exc())
    return ApiError(500, "this service has made a mistake", code="internal")


async def route_of(request: web.Request) -> str:
    """The pattern that the path fits, whatever the method."""
    if (resource := request.match_info.route.resource) is not None:
        return resource.canonical
    for other in request.app.router.resources():
        _, methods = await other.resolve(request)
        if methods:
            return other.canonical
    return UNKNOWN


def api_error(error: web.HTTPException, request: web.Request) -> ApiError:
    """An answer of aiohttp's own in the API's form."""
    if error.status == 404:
        return ApiError(404, f"there is no {request.method} {request.path}", code="not_found")
    if isinstance(error, web.HTTPMethodNotAllowed):
        text = f"{request.path} does not take {request.method}"
        return ApiError(405, text, code="method_not_allowed", allow=error.allowed_methods)
    if error.status == 417:
        text = "no other expectation is met here than Expect: 100-continue; leave the header out"
        return ApiError(417, text, code="expectation_failed")
    return ApiError(error.status, error.reason, code="http_error")


def response_of(error: ApiError) -> web.Response:
    """An error, as it is sent."""
    response = web.Response(
        body=msgspec.json.encode(error.body()),
        status=error.status,
        content_type="application/json",
        headers=dict(error.headers),
    )
    if error.status in (408, 413, 417):
        # The rest of the body is of no interest.
        response.force_close()
    return response
