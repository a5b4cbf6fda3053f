"""The service on its socket: connections that are counted and must speak, and a graceful end."""

from __future__ import annotations

import asyncio
import socket
import ssl

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from asyncspec_nodes.http.app import Service
from asyncspec_nodes.http.connection import Connection

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
