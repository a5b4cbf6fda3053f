"""One connection to the service: what is no HTTP is refused in the API's form.

Law of this file: nothing that a client has sent is logged, and aiohttp's own errors quote it.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from asyncspec_nodes.http.errors import ApiError
from asyncspec_nodes.http.guard import UNKNOWN, api_error, mistake, response_of, route_of
from asyncspec_nodes.http.metrics import Metrics

KEEP_ALIVE_SECONDS = 75.0
LINGER_SECONDS = 2.0
"""For what a client still sends when its answer is complete."""


class Connection(web.RequestHandler):
    """aiohttp's, with errors of our own."""

    def __init__(self, server: web.Server, metrics: Metrics) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            auto_decompress=False,
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=KEEP_ALIVE_SECONDS,
            lingering_time=LINGER_SECONDS,
        )
        self._metrics = metrics

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``. Where what comes is no HTTP, aiohttp (3.14) has that answered
        behind the request whose body it is, and tells nobody who waits for the rest of that."""
        super().data_received(data)
        if not self._messages or isinstance(self._messages[-1][0], RawRequestMessage):
            return
        if self._current_request is not None and not self._current_request.content.is_eof():
            self._current_request.content.set_exception(web.RequestPayloadError("malformed"))

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer: also one of aiohttp's own, to what it has not let through to any handler
        of ours."""
        if isinstance(resp, web.HTTPException) and isinstance(request, web.Request):
            self._metrics.requested(await route_of(request), resp.status)
            resp = response_of(api_error(resp, request))
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what could not be read, or to what went wrong outside of all handlers."""
        if isinstance(exc, ConnectionError):
            raise exc  # the client has left: there is nobody to tell
        if isinstance(exc, HttpProcessingError):
            _note(request.remote)
            error = _refusal(status, exc)
        else:
            error = mistake()
        self._metrics.requested(UNKNOWN, error.status)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun: no other can follow")
        response = response_of(error)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """What ends the connection without an answer."""
        if isinstance(kw.get("exc_info"), (HttpProcessingError, web.RequestPayloadError)):
            _note(None)
        else:
            super().log_exception(*args, **kw)


def _note(address: str | None) -> None:
    whose = f" from {address}" if address else ""
    sys.stderr.write(f"a request{whose} that is not HTTP was refused\n")


def _refusal(status: int, error: HttpProcessingError) -> ApiError:
    if isinstance(error, LineTooLong):
        text = "the address or a header of the request is too long"
    else:
        text = "the request is not HTTP: its first line, a header or its body is malformed"
    return ApiError(status, text, code="invalid_http")
