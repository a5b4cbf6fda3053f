"""The routes of the service."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec
from aiohttp import web

from asyncspec.errors import AsyncSpecError
from asyncspec_nodes.http import site
from asyncspec_nodes.http.answering import Answering
from asyncspec_nodes.http.auth import Keys
from asyncspec_nodes.http.body import read_body
from asyncspec_nodes.http.chat import ChatRequest
from asyncspec_nodes.http.completions import CompletionRequest
from asyncspec_nodes.http.drain import Drain
from asyncspec_nodes.http.engine import Engine
from asyncspec_nodes.http.errors import ApiError
from asyncspec_nodes.http.guard import guarded
from asyncspec_nodes.http.limits import Limits, Places, check_prompts
from asyncspec_nodes.http.metrics import Metrics
from asyncspec_nodes.http.models import Models
from asyncspec_nodes.http.origins import Origins
from asyncspec_nodes.http.parameters import parse
from asyncspec_nodes.http.state import state, statuses, trouble

LOADING_RETRY_SECONDS = 5
"""``Retry-After`` while models load."""


class Service:
    """One HTTP service over one cluster. Make it inside a running event loop.

    Without an ``engine`` it is loading: it says that it is alive, and answers everything else with
    a 503 that has ``awaited()``, until ``serve`` is called."""

    def __init__(
        self,
        engine: Engine | None = None,
        model: str = "",
        *,
        keys: Keys | None = None,
        origins: Origins | None = None,
        limits: Limits | None = None,
        awaited: Callable[[], str] = lambda: "",
    ) -> None:
        self._engine = engine
        self._awaited = awaited
        self.models = Models(model)
        self.keys = keys or Keys()
        self.origins = origins or Origins()
        self.limits = limits or Limits()
        self.metrics = Metrics()
        self.places = Places(self.limits.concurrent)
        self.drain = Drain()

    @property
    def engine(self) -> Engine:
        """What requests are served by. Raises ``ApiError`` while it is loading."""
        if self._engine is None:
            text = f"the service is loading; it waits for {self._awaited()}"
            raise ApiError(503, text, code="loading", retry_after=LOADING_RETRY_SECONDS)
        return self._engine

    def serve(self, engine: Engine, model: str) -> None:
        """Loading is over: ``engine`` serves requests, ``model`` is its target's public name."""
        self._engine = engine
        self.models = Models(model)

    def app(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[guarded(self.keys, self.origins, self.metrics)])
        app.on_response_prepare.append(self.origins.sign)
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
        return await self._answer(request, ChatRequest)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, CompletionRequest)

    async def _answer(
        self, request: web.Request, kind: type[ChatRequest | CompletionRequest]
    ) -> web.StreamResponse:
        with self.drain.work():
            engine = self.engine
            async with self.drain.bounded():
                body = await read_body(request, self.limits)
            wanted = parse(body, kind)
            self.models.check(wanted.model)
            tenant = self.keys.check(request.headers.get("Authorization"))
            # A seed that nobody chose is drawn here, and said in the answer; any JSON can hold it.
            asked = wanted.asked(seed=secrets.randbits(53)).of_tenant(tenant)
            check_prompts(asked, self.limits)
            with self.places.take(len(asked.submits)):
                answering = Answering(
                    asked, engine, self.drain, self.limits, self.metrics, self.models.name
                )
                return await answering.answer(request)

    async def _health(self, request: web.Request) -> web.Response:
        """This process is alive."""
        return _json({"status": "ok"})

    async def _ready(self, request: web.Request) -> web.Response:
        """Whether a request that comes now would be served."""
        why = "the service is stopping" if self.drain.stopping else await trouble(self.engine)
        if why:
            raise ApiError(503, why, code="unavailable", retry_after=1)
        return _json({"status": "ready"})

    async def _metrics(self, request: web.Request) -> web.Response:
        try:
            nodes = await statuses(self.engine)
        except (AsyncSpecError, ApiError):
            nodes = ()  # the service's own numbers are worth having
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self.metrics.text(nodes), headers=headers)

    async def _state(self, request: web.Request) -> web.Response:
        places = {"taken": self.places.taken, "most": self.limits.concurrent}
        return _json({**await state(self.engine), "served_as": self.models.name, "places": places})

    async def _models(self, request: web.Request) -> web.Response:
        return _json(self._served().all())

    async def _model(self, request: web.Request) -> web.Response:
        models = self._served()
        models.check(request.match_info["name"])
        return _json(models.one())

    def _served(self) -> Models:
        """Raises ``ApiError`` while it is loading: nothing is served yet."""
        _ = self.engine
        return self.models


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
