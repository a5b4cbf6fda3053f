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
from asyncspec_nodes.http.origins import Origins

CLOSED = 499
"""In the metrics: the client has left (nginx's number)."""

UNKNOWN = "unknown"
"""In the metrics: no route of this service."""

OPEN = frozenset({"/health", "/ready", *site.FILES})
"""Routes that need no key: they tell nothing of anybody's requests."""


def guarded(keys: Keys, origins: Origins, metrics: Metrics) -> Middleware:
    """The middleware of a service."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        status, route = CLOSED, await route_of(request)
        try:
            response: web.StreamResponse | None = origins.preflight(request)
            if response is None:
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
