"""Around every HTTP request: access, body, metrics, and errors in the API's form."""

from __future__ import annotations

import asyncio
import io
import secrets
import sys
import time
import traceback
from contextvars import ContextVar
from typing import Any

import msgspec
from aiohttp import ClientConnectionError, web
from aiohttp.typedefs import Handler, Middleware

from asyncspec.core.errors import AsyncSpecError
from asyncspec_nodes.http.access import ServiceOptions
from asyncspec_nodes.http.api.errors import ApiError, invalid, unavailable
from asyncspec_nodes.http.keys import ANYBODY, Caller
from asyncspec_nodes.http.limits import Limits
from asyncspec_nodes.http.metrics import METHODS, Metrics

CLIENT_CLOSED = 499
"""Status in the metrics when the client has disconnected (as nginx)."""

UNKNOWN_ROUTE = "unknown"
"""Route in the metrics for paths of no route."""

PUBLIC_ROUTES = frozenset({"/health", "/ready"})
"""Routes without authentication, as dialects' public ones: they reveal nothing of requests."""


METRICS_ROUTE = "/metrics"

SERVER = "asyncspec"
"""The ``Server`` header, which names no version of anything."""

QUIET_ROUTES = frozenset({"/health", "/ready", "/state", METRICS_ROUTE})
"""Requests that machines repeat: logged at level debug, as files of a page."""

KEY_NAME = web.RequestKey("KEY_NAME", str)
"""In requests whose API key has been accepted: its name."""

CALLER: ContextVar[Caller] = ContextVar("CALLER", default=ANYBODY)
"""Whose key the request being handled has."""

PIECE_BYTES = 1 << 16
"""Bytes of a body that are written at once."""

REQUEST_ID: ContextVar[str] = ContextVar("REQUEST_ID")
"""Id of the request being handled: in its log lines here and at the draft node, and part of the
response's id."""


def make_middleware(
    options: ServiceOptions, metrics: Metrics, log: Any, files: frozenset[str]
) -> Middleware:
    """Checks host, origin and key, counts and logs the request, and converts errors to JSON.
    ``files``: paths of a page's files, which need no key."""
    public = PUBLIC_ROUTES | files | ({METRICS_ROUTE} if options.public_metrics else frozenset())

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        status, route, began = CLIENT_CLOSED, await route_of(request), time.monotonic()
        REQUEST_ID.set(secrets.token_hex(12))
        caller = ANYBODY
        try:
            options.hosts.check(request.headers.get("Host"))
            response: web.StreamResponse | None = options.origins.preflight(request)
            if response is None:
                options.origins.check(request)
                if route not in public:
                    caller = options.keys.check(credentials(request))
                    CALLER.set(caller)
                    if caller.name:
                        request[KEY_NAME] = caller.name
                response = await handler(request)
            status = response.status
            return response
        except ConnectionError:
            raise  # the client has disconnected
        except Exception as exception:
            error = api_error(exception, request)
            status = error.status
            return error_response(error, request.path)
        finally:
            seconds = time.monotonic() - began
            metrics.requested(route, request.method, status, seconds)
            if caller.name:
                metrics.key_requested(caller.name, status)
            say = log.debug if route in QUIET_ROUTES | files else log.info
            say(
                "access",
                method=request.method if request.method in METHODS else "other",
                route=route,
                status=status,
                seconds=round(seconds, 3),
                remote=request.remote,
                **({"key": caller.name} if caller.name else {}),
                request=REQUEST_ID.get(),
            )

    return middleware


def credentials(request: web.Request) -> str | None:
    """The key of a request, as ``Authorization`` has it; Anthropic's clients send it by itself."""
    key = request.headers.get("x-api-key")
    return request.headers.get("Authorization") or (f"Bearer {key}" if key else None)


async def name_server(request: web.Request, response: web.StreamResponse) -> None:
    """The ``Server`` header of a response that a handler begins; aiohttp would name its version."""
    response.headers["Server"] = SERVER


async def route_of(request: web.Request) -> str:
    """The route's pattern for the request's path, whatever the method."""
    if (resource := request.match_info.route.resource) is not None:
        return resource.canonical
    for resource in request.app.router.resources():
        _, methods = await resource.resolve(request)
        if methods:
            return resource.canonical
    return UNKNOWN_ROUTE


def api_error(error: Exception, request: web.Request | None = None) -> ApiError:
    """The response to an exception that is being handled."""
    match error:
        case ApiError():
            return error
        case AsyncSpecError():
            return unavailable(str(error))
        case web.HTTPException() if request is not None:
            return http_error(error, request)
    return internal_error()


def internal_error() -> ApiError:
    """A 500 for the exception being handled. Its traceback, which quotes no request, is printed."""
    sys.stderr.write(traceback.format_exc())
    return ApiError(500, "this service has made a mistake", code="internal")


def http_error(error: web.HTTPException, request: web.Request) -> ApiError:
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


def json_response(
    value: object, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    body = msgspec.json.encode(value)
    return web.Response(
        # A large one is written in pieces: TLS would hand on all of it, and show nothing of it.
        body=body if len(body) <= PIECE_BYTES else io.BytesIO(body),
        status=status,
        content_type="application/json",
        headers=headers,
    )


def error_response(error: ApiError, path: str = "") -> web.Response:
    """In the form of the API that the path is of, also where it is no route."""
    response = json_response(error_body(error, path), error.status, error.headers)
    if error.status in (408, 413, 417):
        # The rest of the body is not read.
        response.force_close()
    return response


def error_body(error: ApiError, path: str) -> object:
    """An error as OpenAI's clients read it, or Ollama's or Anthropic's."""
    if path.startswith("/api/"):
        return {"error": error.message}
    body = error.body()
    if path.startswith("/v1/messages"):
        said = body["error"]
        return {"type": "error", "error": {"type": said["type"], "message": said["message"]}}
    return body


async def read_body(request: web.Request, limits: Limits) -> bytes:
    """The bytes of a JSON body. Raises ``ApiError``."""
    # Pages of other sites can send forms without a preflight, but not JSON. Ollama's clients name
    # any type or none; there the origin, which browsers send with every POST, has to do.
    if request.content_type != "application/json" and not request.path.startswith("/api/"):
        raise ApiError(
            415,
            f"the content type is {request.content_type}; send application/json",
            code="unsupported_media_type",
        )
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise ApiError(415, "send the body without compression", code="unsupported_media_type")
    max_bytes = limits.body_bytes
    too_large = ApiError(413, f"the body has more than {max_bytes} bytes", code="request_too_large")
    if (request.content_length or 0) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.content.iter_any():
                body += part
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        seconds = limits.body_seconds
        raise ApiError(408, f"the body did not come in {seconds:g} s", code="timeout") from None
    except (web.RequestPayloadError, ClientConnectionError, ValueError):
        text = "the body is not what its headers say: it cannot be read"
        raise invalid(text, code="invalid_http") from None
    return bytes(body)
