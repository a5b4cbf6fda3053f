"""Checks on every HTTP request: origin (CORS), API key, body; and errors in the API's form."""

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
from asyncspec_nodes.http.hosts import AllowedHosts
from asyncspec_nodes.http.limits import Limits
from asyncspec_nodes.http.metrics import Metrics

ANY = "*"
PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST",
    # "*" never includes Authorization; it allows the headers that client libraries add.
    "Access-Control-Allow-Headers": "Authorization, Content-Type, *",
    "Access-Control-Max-Age": "600",
}
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_DEFAULT_PORTS = (("http://", ":80"), ("https://", ":443"))
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/?#@:*\[\]]+)(:[0-9]{1,5})?")


class AllowedOrigins:
    """Origins whose pages may use the service from a browser, as browsers write them; ``*`` is all.

    A preflight carries no key, so its answer is the same for every path."""

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self.allowed = frozenset(allowed)

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
        # Behind a proxy that rewrites Host, only the browser knows.
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


def read_origins(given: Iterable[str]) -> AllowedOrigins:
    """Normalises ``--allow-origin``: lower case, no default port. Raises ``UserError``."""
    return AllowedOrigins([one if one == ANY else _origin(one) for one in given])


def _origin(given: str) -> str:
    origin = given.lower()
    if not _ORIGIN.fullmatch(origin):
        raise UserError(
            f"--allow-origin is {given}; it must be SCHEME://HOST or SCHEME://HOST:PORT, without a "
            f"path, or {ANY}"
        )
    for scheme, port in _DEFAULT_PORTS:
        if origin.startswith(scheme):
            origin = origin.removesuffix(port)
    return origin


# --- API keys.

API_KEY_VARIABLE = "ASYNCSPEC_API_KEY"
_COMMENT = re.compile(r"(^|\s)#.*")


class ApiKeys:
    """The accepted API keys; without any the service is open.
    ``share_prefixes``: requests of different keys may share prompt prefixes."""

    def __init__(self, keys: Iterable[str] = (), *, share_prefixes: bool = False) -> None:
        self._digests = tuple(map(_digest, keys))
        self._share_prefixes = share_prefixes

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, header: str | None) -> str:
        """The tenant (``Submit.tenant``) of an ``Authorization`` header. Raises ``ApiError``."""
        if not self._digests:
            return ""
        scheme, _, key = (header or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise ApiError(
                401, "there is no API key; send Authorization: Bearer KEY", code="missing_api_key"
            )
        given = _digest(key.strip())
        # Compares with every key in constant time.
        same = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(same):
            raise ApiError(401, "the API key is not one of this service", code="invalid_api_key")
        return "" if self._share_prefixes else _tenant(given)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _tenant(digest: bytes) -> str:
    """A second hash of the key, so that the tenant's name does not reveal the key."""
    return hmac.digest(digest, b"asyncspec tenant", "sha256")[:16].hex()


def read_keys(file: Path | None, *, share_prefixes: bool = False) -> ApiKeys:
    """Keys from a file, one a line; ``#`` at the start or after a space begins a comment. Without
    a file, the environment's key. Raises ``UserError``."""
    if file is None:
        key = os.environ.get(API_KEY_VARIABLE, "").strip()
        return ApiKeys([key] if key else [], share_prefixes=share_prefixes)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"cannot read the API keys in {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"the API keys in {file} are not UTF-8 text") from None
    keys = [key for line in lines if (key := _COMMENT.sub("", line).strip())]
    if not keys:
        raise UserError(f"there is no API key in {file}; write one a line")
    return ApiKeys(keys, share_prefixes=share_prefixes)


# --- Request body


async def read_body(request: web.Request, limits: Limits) -> bytes:
    """The bytes of a JSON body. Raises ``ApiError``."""
    # Pages of other sites can send forms without a preflight, but not JSON.
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


# --- The middleware

CLIENT_CLOSED = 499
"""Status in the metrics when the client has disconnected (as nginx)."""

UNKNOWN_ROUTE = "unknown"
"""Route in the metrics for paths of no route."""

PUBLIC_ROUTES = frozenset({"/health", "/ready", *site.FILES})
"""Routes without authentication: they reveal nothing of requests."""


def make_middleware(
    keys: ApiKeys, hosts: AllowedHosts, origins: AllowedOrigins, metrics: Metrics
) -> Middleware:
    """Checks host, origin and key, counts the request, and converts errors to JSON."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        status, route = CLIENT_CLOSED, await route_of(request)
        try:
            hosts.check(request.headers.get("Host"))
            response: web.StreamResponse | None = origins.preflight(request)
            if response is None:
                origins.check(request)
                if route not in PUBLIC_ROUTES:
                    keys.check(request.headers.get("Authorization"))
                response = await handler(request)
            status = response.status
            return response
        except ApiError as error:
            status = error.status
            return error_response(error)
        except web.HTTPException as error:
            status = error.status
            return error_response(api_error(error, request))
        except ConnectionError:
            raise  # the client has disconnected
        except Exception:
            status = 500
            return error_response(internal_error())
        finally:
            metrics.requested(route, status)

    return middleware


def internal_error() -> ApiError:
    """A 500 for the exception being handled. Its traceback goes to stderr; a traceback has no text
    of a request."""
    sys.stderr.write(traceback.format_exc())
    return ApiError(500, "this service has made a internal_error", code="internal")


async def route_of(request: web.Request) -> str:
    """The route's pattern for the request's path, whatever the method."""
    if (resource := request.match_info.route.resource) is not None:
        return resource.canonical
    for other in request.app.router.resources():
        _, methods = await other.resolve(request)
        if methods:
            return other.canonical
    return UNKNOWN_ROUTE


def api_error(error: web.HTTPException, request: web.Request) -> ApiError:
    """aiohttp's own error in the API's form."""
    if error.status == 404:
        return ApiError(404, f"there is no {request.method} {request.path}", code="not_found")
    if isinstance(error, web.HTTPMethodNotAllowed):
        text = f"{request.path} does not take {request.method}"
        return ApiError(405, text, code="method_not_allowed", allow=error.allowed_methods)
    if error.status == 417:
        text = "no other expectation is met here than Expect: 100-continue; leave the header out"
        return ApiError(417, text, code="expectation_failed")
    return ApiError(error.status, error.reason, code="http_error")


def error_response(error: ApiError) -> web.Response:
    response = web.Response(
        body=msgspec.json.encode(error.body()),
        status=error.status,
        content_type="application/json",
        headers=dict(error.headers),
    )
    if error.status in (408, 413, 417):
        # The rest of the body is not read.
        response.force_close()
    return response
