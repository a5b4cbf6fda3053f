"""The routes of the HTTP service."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import msgspec
from aiohttp import web

from asyncspec.core.errors import AsyncSpecError
from asyncspec_nodes.http import site
from asyncspec_nodes.http.api.completions import ChatRequest, CompletionRequest
from asyncspec_nodes.http.api.errors import ApiError
from asyncspec_nodes.http.api.parameters import parse
from asyncspec_nodes.http.engine import Engine, cluster_state, node_statuses, unready_reason
from asyncspec_nodes.http.hosts import AllowedHosts
from asyncspec_nodes.http.limits import ConcurrencyLimit, GracefulShutdown, Limits, check_prompts
from asyncspec_nodes.http.metrics import Metrics
from asyncspec_nodes.http.middleware import AllowedOrigins, ApiKeys, make_middleware, read_body
from asyncspec_nodes.http.responses import CompletionResponder

LOADING_RETRY_SECONDS = 5
"""``Retry-After`` while models load."""


class ServedModel:
    """The one model of a service, under its public name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._created = int(time.time())

    def check(self, name: str | None) -> None:
        """Raises ``ApiError`` for another name; no name means this model."""
        if name and name != self.name:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this service has {self.name!r}",
                param="model",
                code="model_not_found",
            )

    def describe(self) -> dict[str, object]:
        """The JSON object of ``GET /v1/models/NAME``."""
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "asyncspec",
        }


class Service:
    """One HTTP service over one cluster. Make it inside a running event loop.

    Without an ``engine`` it is loading: ``/health`` answers, and everything else is a 503 that
    includes ``pending()``, until ``serve`` is called."""

    def __init__(
        self,
        engine: Engine | None = None,
        model: str = "",
        *,
        keys: ApiKeys | None = None,
        hosts: AllowedHosts | None = None,
        origins: AllowedOrigins | None = None,
        limits: Limits | None = None,
        pending: Callable[[], str] = lambda: "",
    ) -> None:
        self._engine = engine
        self._pending = pending
        self.model = ServedModel(model)
        self.keys = keys or ApiKeys()
        self.hosts = hosts or AllowedHosts()
        self.origins = origins or AllowedOrigins()
        self.limits = limits or Limits()
        self.metrics = Metrics()
        self.concurrency = ConcurrencyLimit(self.limits.concurrent)
        self.shutdown = GracefulShutdown()

    @property
    def engine(self) -> Engine:
        """Raises ``ApiError`` while the service is loading."""
        if self._engine is None:
            text = f"the service is loading; it waits for {self._pending()}"
            raise ApiError(503, text, code="loading", retry_after=LOADING_RETRY_SECONDS)
        return self._engine

    def serve(self, engine: Engine, model: str) -> None:
        """End loading: ``engine`` serves requests for the model named ``model``."""
        self._engine = engine
        self.model = ServedModel(model)

    def app(self) -> web.Application:
        """The aiohttp application."""
        middleware = make_middleware(self.keys, self.hosts, self.origins, self.metrics)
        app = web.Application(middlewares=[middleware])
        app.on_response_prepare.append(self.origins.add_headers)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/state", self._state)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        site.add_routes(app)
        return app

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, ChatRequest)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, CompletionRequest)

    async def _complete(
        self, request: web.Request, kind: type[ChatRequest | CompletionRequest]
    ) -> web.StreamResponse:
        with self.shutdown.track():
            engine = self.engine
            async with self.shutdown.interruptible():
                body = await read_body(request, self.limits)
            fields = parse(body, kind)
            self.model.check(fields.model)
            tenant = self.keys.check(request.headers.get("Authorization"))
            # The default seed is reported in the response; 53 bits fit any JSON number.
            parsed = fields.parsed(seed=secrets.randbits(53)).for_tenant(tenant)
            check_prompts(parsed, self.limits)
            with self.concurrency.acquire(len(parsed.submits)):
                responder = CompletionResponder(
                    parsed, engine, self.shutdown, self.limits, self.metrics, self.model.name
                )
                return await responder.respond(request)

    async def _health(self, request: web.Request) -> web.Response:
        """This process is alive."""
        return _json({"status": "ok"})

    async def _ready(self, request: web.Request) -> web.Response:
        """Whether a request that comes now would be served."""
        stopping = "the service is stopping" if self.shutdown.stopping else ""
        if reason := stopping or await unready_reason(self.engine):
            raise ApiError(503, reason, code="unavailable", retry_after=1)
        return _json({"status": "ready"})

    async def _metrics(self, request: web.Request) -> web.Response:
        try:
            nodes = await node_statuses(self.engine)
        except (AsyncSpecError, ApiError):
            nodes = ()  # the service's own metrics are still useful
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self.metrics.text(nodes), headers=headers)

    async def _state(self, request: web.Request) -> web.Response:
        cluster = await cluster_state(self.engine)
        places = {"taken": self.concurrency.taken, "most": self.limits.concurrent}
        return _json({**cluster, "served_as": self.model.name, "places": places})

    async def _models(self, request: web.Request) -> web.Response:
        _ = self.engine  # while loading, no model is served
        return _json({"object": "list", "data": [self.model.describe()]})

    async def _model(self, request: web.Request) -> web.Response:
        _ = self.engine
        self.model.check(request.match_info["name"])
        return _json(self.model.describe())


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
