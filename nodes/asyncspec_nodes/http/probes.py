"""What every node serves over HTTP: whether it lives, whether it is ready, and its metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web

from asyncspec.core.errors import AsyncSpecError, ClusterError
from asyncspec_nodes.console.log import make_logger
from asyncspec_nodes.console.log_table import LogTable
from asyncspec_nodes.http.access import ServiceOptions
from asyncspec_nodes.http.api.errors import ApiError, unavailable
from asyncspec_nodes.http.limits import GracefulShutdown
from asyncspec_nodes.http.metrics import Metrics
from asyncspec_nodes.http.middleware import (
    credentials,
    json_response,
    make_middleware,
    name_server,
)
from asyncspec_protocol.messages import Status

LOADING_RETRY_SECONDS = 5
"""``Retry-After`` while models load."""

STATUS_SECONDS = 5.0
"""A node that does not report its status within this time counts as unreachable."""

Statuses = Callable[[], Awaitable[tuple[Status, ...]]]


class Probes:
    """``/health``, ``/ready`` and ``/metrics`` of a process. Make it inside a running event loop.

    Until ``report`` is called it is loading: ``/health`` and ``/metrics`` answer, everything else
    is a 503 that includes ``pending()``."""

    def __init__(
        self, options: ServiceOptions, pending: Callable[[], str], log: Any = None
    ) -> None:
        self.options = options
        self._pending = pending
        self._statuses_of: Statuses | None = None
        self.log = make_logger(LogTable()) if log is None else log
        self.metrics = Metrics()
        self.shutdown = GracefulShutdown()

    def report(self, statuses: Statuses) -> None:
        """End loading: ``statuses`` are those of the nodes that this process reports on."""
        self._statuses_of = statuses

    @property
    def public_routes(self) -> frozenset[str]:
        """Paths, beside those of every process, that need no key and are logged at level debug."""
        return frozenset()

    def app(self) -> web.Application:
        """The routes."""
        middleware = make_middleware(self.options, self.metrics, self.log, self.public_routes)
        app = web.Application(middlewares=[middleware])
        app.on_response_prepare.extend((self.options.origins.add_headers, name_server))
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        return app

    def loading(self) -> ApiError:
        """The answer to requests that cannot be served yet."""
        text = f"the service is loading; it waits for {self._pending()}"
        return ApiError(503, text, code="loading", retry_after=LOADING_RETRY_SECONDS)

    def missing(self, nodes: Sequence[Status]) -> str:
        """Why the process is not ready; empty where it is."""
        return "; ".join(filter(None, (node.missing for node in nodes)))

    def served_model(self) -> str:
        """The model's public name, in metrics; empty: as the nodes name it."""
        return ""

    async def statuses(self) -> tuple[Status, ...]:
        """Status of every reachable node. Raises ``ClusterError``; ``ApiError`` while loading."""
        if self._statuses_of is None:
            raise self.loading()
        try:
            async with asyncio.timeout(STATUS_SECONDS):
                return await self._statuses_of()
        except TimeoutError:
            raise ClusterError(
                f"the nodes do not say how they are in {STATUS_SECONDS:g} s"
            ) from None

    async def _health(self, request: web.Request) -> web.Response:
        """This process is alive."""
        return json_response({"status": "ok"})

    async def _ready(self, request: web.Request) -> web.Response:
        """Whether a request that comes now would be served."""
        if self.shutdown.stopping:
            raise unavailable("the service is stopping")
        if reason := self.missing(await self.statuses()):
            raise unavailable(reason)
        return json_response({"status": "ready"})

    async def _metrics(self, request: web.Request) -> web.Response:
        try:
            nodes = await self.statuses()
        except (AsyncSpecError, ApiError):
            nodes = ()  # the service's own metrics are still useful
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        try:
            self.options.keys.check(credentials(request))
            keys = True
        except ApiError:  # the route is open: --public-metrics
            keys = False
        text = self.metrics.text(nodes, self.served_model(), keys=keys)
        return web.Response(body=text, headers=headers)
