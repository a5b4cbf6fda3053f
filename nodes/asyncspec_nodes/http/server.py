"""One connection to the service: what is no HTTP is refused in the API's form.

Law of this file: nothing that a client has sent is logged, and aiohttp's own errors quote it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from typing import Any

from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.typedefs import Handler, Middleware

from asyncspec_nodes.http.api.errors import ApiError
from asyncspec_nodes.http.app import Service
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


# --- The service on its socket: connections that are counted and must speak, and a graceful end.

CLEANUP_SECONDS = 2.0
"""For readers to take the end of their streams; a slow one has it twice, then is cut off."""
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class _Refused(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(_FULL)
        transport.close()


class HttpServer:
    """``async with``: inside, the service is served on ``sock``, over ``tls`` if given. Leaving
    ends what runs with an error, and closes all connections; ``drain`` before it lets what runs
    come to its end."""

    def __init__(
        self, service: Service, sock: socket.socket, tls: ssl.SSLContext | None = None
    ) -> None:
        self.service = service
        self._tls = tls
        self._sock = sock
        self._silent: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}
        app = service.app()
        app.middlewares.insert(0, self._spoken())
        self._runner = web.AppRunner(
            app,
            # A client that leaves cancels what it has asked for.
            handler_cancellation=True,
            shutdown_timeout=CLEANUP_SECONDS,
        )

    @property
    def scheme(self) -> str:
        """Of its addresses."""
        return "http" if self._tls is None else "https"

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._sock.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """Where it listens, as clients write it."""
        host: str = self._sock.getsockname()[0]
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def connections(self) -> int:
        """Those that are open."""
        assert self._runner.server is not None
        return len(self._runner.server.connections)

    async def __aenter__(self) -> HttpServer:
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        handshake = self.service.limits.request_seconds if self._tls else None
        self._server = await loop.create_server(
            self._accept, sock=self._sock, ssl=self._tls, ssl_handshake_timeout=handshake
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._server.close()
        for timer in self._silent.values():
            timer.cancel()
        self.service.drain.cut()
        await self._runner.cleanup()
        await self._server.wait_closed()

    async def drain(self, hurry: asyncio.Event) -> None:
        """Let running answers end, for a while, or until ``hurry``; requests that come meanwhile
        are told to go elsewhere."""
        drained = self.service.drain.finish(self.service.limits.drain_seconds)
        tasks = [asyncio.create_task(drained), asyncio.create_task(hurry.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self) -> asyncio.BaseProtocol:
        limits, server = self.service.limits, self._runner.server
        assert server is not None
        if len(server.connections) >= limits.connections:
            return _Refused()
        handler = Connection(server, self.service.metrics)
        loop = asyncio.get_running_loop()
        self._silent[handler] = loop.call_later(limits.request_seconds, self._give_up, handler)
        return handler

    def _give_up(self, handler: web.RequestHandler) -> None:
        """A connection has not said what it wants."""
        del self._silent[handler]
        if handler.transport is not None:
            handler.transport.abort()

    def _spoken(self) -> Middleware:
        @web.middleware
        async def spoken(request: web.Request, handler: Handler) -> web.StreamResponse:
            if (timer := self._silent.pop(request.protocol, None)) is not None:
                timer.cancel()
            return await handler(request)

        return spoken
