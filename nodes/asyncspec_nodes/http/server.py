"""The HTTP server on its socket: connections, their errors and limits, graceful shutdown.

Nothing that a client sends is logged; aiohttp's own error texts would quote it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from asyncspec.actor.tcp import TlsListener, stop_listening
from asyncspec_nodes.http.api.errors import ApiError
from asyncspec_nodes.http.limits import Limits
from asyncspec_nodes.http.metrics import Metrics
from asyncspec_nodes.http.middleware import (
    KEY_NAME,
    PIECE_BYTES,
    SERVER,
    UNKNOWN_ROUTE,
    api_error,
    error_response,
    internal_error,
    route_of,
)
from asyncspec_nodes.http.places import SWEEP_SECONDS, Places, network
from asyncspec_nodes.http.probes import Probes

KEEP_ALIVE_SECONDS = 75.0
LINGER_SECONDS = 2.0
"""Time to read what a client still sends after its response."""


LOOKS = 4
"""So many in the time after which a reader is cut off. They are counted, not the time: where this
process was held up, a reader had no chance."""


class Progress:
    """Whether a reader takes what is written to it."""

    def __init__(self) -> None:
        self._taken = self._idle = 0

    def stalled(self, written: int, waiting: int) -> bool:
        """Another look: whether it has taken nothing for ``LOOKS`` of them. ``written``: bytes in
        all, of which some are ``waiting``."""
        taken = written - waiting
        self._idle = 0 if not waiting or taken != self._taken else self._idle + 1
        self._taken = taken
        return self._idle >= LOOKS


class Connection(web.RequestHandler):
    """aiohttp's connection handler with errors in the API's form. It is aborted where TLS and its
    first request take more than ``request_seconds``, and where its reader takes nothing for
    ``stall_seconds``, which cancels its request."""

    def __init__(
        self,
        server: web.Server,
        metrics: Metrics,
        limits: Limits,
        places: Places,
        give_up: Callable[[Connection], None],
    ) -> None:
        """``give_up``: closes one that has no transport yet."""
        loop = asyncio.get_running_loop()
        super().__init__(
            server,
            loop=loop,
            auto_decompress=False,
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=KEEP_ALIVE_SECONDS,
            lingering_time=LINGER_SECONDS,
        )
        self._keyed = False
        self.address = ""
        self._metrics = metrics
        self._places = places
        self._give_up = give_up
        self._request_until = loop.time() + limits.request_seconds
        self._first_request: asyncio.TimerHandle | None = None
        self._progress = Progress()
        self._pause = limits.stall_seconds / LOOKS
        self._look: asyncio.TimerHandle | None = None
        # Writer of the latest response; the request is over before that is written.
        self._writer: AbstractStreamWriter | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        stream = cast(asyncio.Transport, transport)
        self.address = network(str((stream.get_extra_info("peername") or ("",))[0]))
        self._places.bound(self.address)
        # What TLS holds back it hands on at once: only then its reader's progress is seen.
        stream.set_write_buffer_limits(PIECE_BYTES)
        self._check_progress(stream)
        loop = asyncio.get_running_loop()
        # Not before: where there is no TLS with a peer, nothing would end its timer.
        self._first_request = loop.call_at(self._request_until, stream.abort)

    @property
    def keyed(self) -> bool:
        request = self._current_request
        return self._keyed or (request is not None and KEY_NAME in request)

    @property
    def at_work(self) -> bool:
        request = self._current_request
        return request is not None and request.content.is_eof()

    @property
    def unread(self) -> bool:
        return self.transport is not None and self.transport.get_write_buffer_size() > 0

    def drop(self) -> None:
        if self.transport is None:
            self._give_up(self)
        else:
            self.transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._places.leave(self)
        for timer in (self._look, self._first_request):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _check_progress(self, transport: asyncio.Transport) -> None:
        """Also of a transport that aiohttp has closed, which waits for its reader."""
        request = self._current_request
        writer = self._writer if request is None else request.writer
        written = 0 if writer is None else writer.output_size
        try:
            waiting = transport.get_write_buffer_size()
        except AttributeError:
            # asyncio's TLS transport, closed twice, has let go of its protocol, which ends the
            # connection itself after its time for a shutdown.
            return
        if self._progress.stalled(written, waiting):
            transport.abort()
        else:
            loop = asyncio.get_running_loop()
            self._look = loop.call_later(self._pause, self._check_progress, transport)

    def data_received(self, data: bytes) -> None:
        """Fails the reader of a malformed body: aiohttp (3.14) queues the error response behind
        that request without telling its reader."""
        super().data_received(data)
        if not self._messages:
            return
        self._places.touch(self)
        if self._first_request is not None:
            self._first_request.cancel()
        if isinstance(self._messages[-1][0], RawRequestMessage):
            return
        if self._current_request is not None and not self._current_request.content.is_eof():
            self._current_request.content.set_exception(web.RequestPayloadError("malformed"))

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Also converts errors that aiohttp raises before any handler of ours."""
        self._keyed = self._keyed or KEY_NAME in request
        self._places.touch(self)
        if isinstance(resp, web.HTTPException) and isinstance(request, web.Request):
            self._metrics.requested(await route_of(request), request.method, resp.status)
            resp = error_response(api_error(resp, request))
        resp.headers["Server"] = SERVER
        self._writer = request.writer
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The response to malformed HTTP, or to an exception outside of all handlers."""
        if isinstance(exc, ConnectionError):
            raise exc  # the client has disconnected
        if isinstance(exc, HttpProcessingError):
            _log_refused(request.remote)
            text = "the request is not HTTP: its first line, a header or its body is malformed"
            if isinstance(exc, LineTooLong):
                text = "the address or a header of the request is too long"
            error = ApiError(status, text, code="invalid_http")
        else:
            error = internal_error()
        self._metrics.requested(UNKNOWN_ROUTE, request.method, error.status)
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun: no other can follow")
        response = error_response(error)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        if isinstance(kw.get("exc_info"), (HttpProcessingError, web.RequestPayloadError)):
            _log_refused(None)
        else:
            super().log_exception(*args, **kw)


class Connections:
    """Makes the protocols of connections to ``server``, as far as there are places. Inside of
    ``with``, those of strangers that say nothing are closed."""

    def __init__(
        self, server: web.Server, metrics: Metrics, limits: Limits, *, closed: bool = False
    ) -> None:
        """``closed``: as of ``Places``."""
        self.places = Places(limits, closed=closed)
        self._made = partial(Connection, server, metrics, limits, self.places)
        self._sweep: asyncio.TimerHandle | None = None

    def accept(self, give_up: Callable[[Connection], None]) -> Connection | None:
        """One more connection, which ``give_up`` closes while it has no transport; None where
        there is no place."""
        connection = self._made(give_up)
        return connection if self.places.take(connection) else None

    def listen(self, sock: socket.socket, tls: ssl.SSLContext, seconds: float) -> TlsListener[Any]:
        """Accepts connections on ``sock``, each of which agrees on TLS within so many seconds."""
        listener: TlsListener[Connection] = TlsListener(
            *(sock, tls, lambda: self.accept(listener.drop), self.places.leave),
            handshake_seconds=seconds,
        )
        return listener

    def __enter__(self) -> Connections:
        self._sweep_all()
        return self

    def _sweep_all(self) -> None:
        self.places.sweep()
        self._sweep = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep_all)

    def __exit__(self, *exception: object) -> None:
        if self._sweep is not None:
            self._sweep.cancel()


def _log_refused(address: str | None) -> None:
    origin = f" from {address}" if address else ""
    sys.stderr.write(f"a request{origin} that is not HTTP was refused\n")


CLEANUP_SECONDS = 2.0
"""Time for readers to take the end of their streams at shutdown."""
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class _Refused(asyncio.Protocol):
    """Answers a connection over the limit with a 503."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(_FULL)
        transport.close()


class HttpServer:
    """``async with``: serves ``service`` on ``sock``. Leaving interrupts running requests and
    closes all connections; call ``drain`` first to let them finish."""

    def __init__(
        self, service: Probes, sock: socket.socket, tls: ssl.SSLContext | None = None
    ) -> None:
        self.service = service
        self._tls = tls
        self._sweeping = ExitStack()
        self._sock = sock
        self._runner = web.AppRunner(
            service.app(),
            # A disconnect cancels the request.
            handler_cancellation=True,
            shutdown_timeout=CLEANUP_SECONDS,
        )

    @property
    def scheme(self) -> str:
        return "http" if self._tls is None else "https"

    @property
    def port(self) -> int:
        port: int = self._sock.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        host: str = self._sock.getsockname()[0]
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def __aenter__(self) -> HttpServer:
        await self._runner.setup()
        loop, tls, limits = asyncio.get_running_loop(), self._tls, self.service.options.limits
        assert self._runner.server is not None
        closed = bool(self.service.options.keys)
        connections = Connections(self._runner.server, self.service.metrics, limits, closed=closed)
        if tls is None:
            self._server: asyncio.Server | TlsListener[Any] = await loop.create_server(
                lambda: connections.accept(connections.places.leave) or _Refused(), sock=self._sock
            )
        else:
            # A refusal would take a handshake as well.
            self._server = connections.listen(self._sock, tls, limits.request_seconds)
        self._sweeping.enter_context(connections)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._sweeping.close()
        await stop_listening(self._server)
        self.service.shutdown.interrupt()
        await self._runner.cleanup()
        await self._server.wait_closed()

    async def drain(self, hurry: asyncio.Event) -> None:
        """Refuse new requests and wait for running ones: ``drain_seconds``, or until ``hurry``."""
        shutdown = self.service.shutdown
        shutdown.stopping = True
        waits = [asyncio.create_task(event.wait()) for event in (shutdown.idle, hurry)]
        await asyncio.wait(
            waits,
            timeout=self.service.options.limits.drain_seconds,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for wait in waits:
            wait.cancel()
