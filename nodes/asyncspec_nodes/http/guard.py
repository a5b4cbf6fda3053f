"""What every request passes: its key is checked, and whatever goes wrong is the API's error."""

from __future__ import annotations

import sys
import traceback

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from asyncspec_nodes.http import site
from asyncspec_nodes.http.auth import Keys
from asyncspec_nodes.http.errors import ApiError
from asyncspec_nodes.http.metrics import Metrics

CLOSED = 499
"""In the metrics: the client has left (nginx's number)."""

OPEN = frozenset({"/health", "/ready", *site.FILES})
"""Routes that need no key: they tell nothing of anybody's requests."""


def guarded(keys: Keys, metrics: Metrics) -> Middleware:
    """The middleware of a service."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        status = CLOSED
        try:
            if _route(request) not in OPEN:
                keys.check(request.headers.get("Authorization"))
            response = await handler(request)
            status = response.status
            return response
        except ApiError as error:
            status = error.status
            return _response(error)
        except web.HTTPException as error:
            status = error.status
            return _response(_of(error, request))
        except ConnectionError:
            raise  # the client has left: there is nobody to tell
        except Exception:
            status = 500
            return _response(mistake())
        finally:
            metrics.requested(_route(request), status)

    return guard


def mistake() -> ApiError:
    """The exception that is handled, which is our own mistake, as the API's error. It is written
    down; no request's text is in it, only where it happened."""
    sys.stderr.write(traceback.format_exc())
    return ApiError(500, "this service has made a mistake", code="internal")


def _route(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return "unknown" if resource is None else resource.canonical


def _of(error: web.HTTPException, request: web.Request) -> ApiError:
    if error.status == 404:
        return ApiError(404, f"there is no {request.method} {request.path}", code="not_found")
    if error.status == 405:
        text = f"{request.path} does not take {request.method}"
        return ApiError(405, text, code="method_not_allowed")
    return ApiError(error.status, error.reason, code="http_error")


def _response(error: ApiError) -> web.Response:
    response = web.Response(
        body=msgspec.json.encode(error.body()),
        status=error.status,
        content_type="application/json",
        headers=dict(error.headers),
    )
    if error.status in (408, 413):
        # The rest of the body is of no interest.
        response.force_close()
    return response
