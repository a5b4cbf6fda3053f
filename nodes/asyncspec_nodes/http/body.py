"""A request's body, as it may come."""

from __future__ import annotations

import asyncio

from aiohttp import ClientConnectionError, web

from asyncspec_nodes.http.errors import ApiError, invalid
from asyncspec_nodes.http.limits import Limits


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
