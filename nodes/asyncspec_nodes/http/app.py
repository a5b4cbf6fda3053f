"""The models a service has: one."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence

import msgspec
from aiohttp import web

from asyncspec.core.errors import AsyncSpecError, ClusterError
from asyncspec_nodes.http import site
from asyncspec_nodes.http.answering import Answering
from asyncspec_nodes.http.api.errors import ApiError
from asyncspec_nodes.http.api.forms import ChatRequest, CompletionRequest
from asyncspec_nodes.http.api.parameters import parse
from asyncspec_nodes.http.engine import Engine
from asyncspec_nodes.http.guard import Keys, Origins, guarded, read_body
from asyncspec_nodes.http.hosts import Hosts
from asyncspec_nodes.http.limits import Drain, Limits, Places, check_prompts
from asyncspec_nodes.http.metrics import Metrics
from asyncspec_protocol.messages import Status


class Models:
    """The target under the name that clients use."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._created = int(time.time())

    def check(self, name: str | None) -> None:
        """Raises ``ApiError`` for a name that is not served. Who says none means the only one."""
        if name and name != self.name:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this service has {self.name!r}",
                param="model",
                code="model_not_found",
            )

    def one(self) -> dict[str, object]:
        """``GET /v1/models/NAME``"""
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "asyncspec",
        }

    def all(self) -> dict[str, object]:
        """``GET /v1/models``"""
        return {"object": "list", "data": [self.one()]}


# --- How the cluster is, as JSON: for the page, and for whoever watches.

ANSWER_SECONDS = 5.0
"""A node that is too busy for a word in all that time counts as unreachable."""


async def statuses(engine: Engine) -> tuple[Status, ...]:
    """Of all nodes that can be reached. Raises ``ClusterError``."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await engine.nodes()
    except TimeoutError:
        raise ClusterError(f"the nodes do not say how they are in {ANSWER_SECONDS:g} s") from None


async def trouble(engine: Engine) -> str:
    """Why no request can be served now; empty where one can."""
    try:
        nodes = await statuses(engine)
    except AsyncSpecError as error:
        return str(error)
    if not any(node.role == "draft" for node in nodes):
        return "the draft node does not answer"
    return missing(nodes)


def missing(nodes: Sequence[Status]) -> str:
    """Why nothing can be served: what the draft node lacks, and what stages say of links that they
    cannot make. Empty where it lacks nothing."""
    draft = next(node.missing for node in nodes if node.role == "draft")
    said = [draft, *(node.missing for node in nodes if node.role != "draft")]
    return "; ".join(filter(None, dict.fromkeys(said))) if draft else ""


async def state(engine: Engine) -> dict[str, object]:
    """The whole picture. Raises ``ApiError``."""
    try:
        nodes = await statuses(engine)
    except AsyncSpecError as error:
        raise ApiError(503, str(error), code="unavailable", retry_after=1) from None
    draft = next(node for node in nodes if node.role == "draft")
    return {
        "model": draft.model,
        "context_length": draft.context_length,
        "defaults": draft.defaults,
        "missing": missing(nodes),
        "nodes": [_node(node) for node in nodes],
    }


def _node(node: Status) -> dict[str, object]:
    links = zip(node.peers, node.round_trips, node.sent, strict=True)
    names = ("rank", "role", "layers", "up_seconds", "busy_seconds", "memory_bytes")
    return {
        **{name: getattr(node, name) for name in (*names, "sessions", "waiting", "slots", "room")},
        "links": [
            {"peer": peer, "round_trip": None if rtt < 0 else rtt, "bytes_sent": sent}
            for peer, rtt, sent in links
        ],
    }


# --- The routes of the service.

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
        hosts: Hosts | None = None,
        origins: Origins | None = None,
        limits: Limits | None = None,
        awaited: Callable[[], str] = lambda: "",
    ) -> None:
        self._engine = engine
        self._awaited = awaited
        self.models = Models(model)
        self.keys = keys or Keys()
        self.hosts = hosts or Hosts()
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
        guard = guarded(self.keys, self.hosts, self.origins, self.metrics)
        app = web.Application(middlewares=[guard])
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
