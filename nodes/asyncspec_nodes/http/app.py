"""The routes of the HTTP service, and what it reports of the cluster behind it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial

from aiohttp import web

from asyncspec.core.errors import AsyncSpecError, ClusterError
from asyncspec_nodes.http import site
from asyncspec_nodes.http.access import ServiceOptions
from asyncspec_nodes.http.api.answers import RequestContext
from asyncspec_nodes.http.api.completions import ChatRequest, Completion, CompletionRequest
from asyncspec_nodes.http.api.errors import ApiError, invalid, unavailable
from asyncspec_nodes.http.api.parameters import parse
from asyncspec_nodes.http.limits import ConcurrencyLimit, GracefulShutdown
from asyncspec_nodes.http.metrics import Metrics
from asyncspec_nodes.http.middleware import json_response, make_middleware, read_body
from asyncspec_nodes.http.streaming import EngineClient, Responder
from asyncspec_protocol.messages import Status

LOADING_RETRY_SECONDS = 5
"""``Retry-After`` while models load."""

STATUS_SECONDS = 5.0
"""A node that does not report its status within this time counts as unreachable."""


class Service:
    """One HTTP service over one cluster, which serves one model under its public name. Make it
    inside a running event loop.

    Until ``serve`` is called it is loading: ``/health`` answers, everything else is a 503 that
    includes ``pending()``."""

    def __init__(self, options: ServiceOptions, pending: Callable[[], str]) -> None:
        self.options = options
        self._pending = pending
        self._engine: EngineClient | None = None
        self.metrics = Metrics()
        self.concurrency = ConcurrencyLimit(options.limits.concurrent)
        self.shutdown = GracefulShutdown()

    @property
    def engine(self) -> EngineClient:
        """Raises ``ApiError`` while the service is loading."""
        if self._engine is None:
            text = f"the service is loading; it waits for {self._pending()}"
            raise ApiError(503, text, code="loading", retry_after=LOADING_RETRY_SECONDS)
        return self._engine

    def serve(self, engine: EngineClient, model: str) -> None:
        """End loading: ``engine`` serves requests for the model named ``model``."""
        self._engine = engine
        self.model = model
        self._created = int(time.time())

    def _model_object(self, name: str) -> dict[str, object]:
        """The JSON object of ``GET /v1/models/NAME``. Raises ``ApiError`` for another model."""
        if name != self.model:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this service has {self.model!r}",
                param="model",
                code="model_not_found",
            )
        return {"id": name, "object": "model", "created": self._created, "owned_by": "asyncspec"}

    def app(self) -> web.Application:
        app = web.Application(middlewares=[make_middleware(self.options, self.metrics)])
        app.on_response_prepare.append(self.options.origins.add_headers)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/state", self._state)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_post("/v1/chat/completions", partial(self._answer, ChatRequest))
        app.router.add_post("/v1/completions", partial(self._answer, CompletionRequest))
        site.add_routes(app)
        return app

    async def _answer(
        self, kind: type[ChatRequest | CompletionRequest], request: web.Request
    ) -> web.StreamResponse:
        with self.shutdown.track():
            engine, limits = self.engine, self.options.limits
            async with self.shutdown.interruptible():
                body = await read_body(request, limits)
            fields = parse(body, kind)
            self._model_object(fields.model or self.model)
            context = RequestContext(
                seed=secrets.randbits(53),  # fits any JSON number
                tenant=self.options.keys.check(request.headers.get("Authorization")),
                model=self.model,
                id=secrets.token_hex(12),
                created=int(time.time()),
            )
            call = fields.call(context)
            _check_prompts(call, limits.prompt_length)
            with self.concurrency.acquire(len(call.submits)):
                responder = Responder(call, engine, self.shutdown, limits, self.metrics)
                return await responder.respond(request)

    async def _health(self, request: web.Request) -> web.Response:
        """This process is alive."""
        return json_response({"status": "ok"})

    async def _ready(self, request: web.Request) -> web.Response:
        """Whether a request that comes now would be served."""
        if self.shutdown.stopping:
            raise unavailable("the service is stopping")
        if reason := _missing(await self._statuses()):
            raise unavailable(reason)
        return json_response({"status": "ready"})

    async def _metrics(self, request: web.Request) -> web.Response:
        try:
            nodes = await self._statuses()
        except (AsyncSpecError, ApiError):
            nodes = ()  # the service's own metrics are still useful
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self.metrics.text(nodes), headers=headers)

    async def _state(self, request: web.Request) -> web.Response:
        nodes = await self._statuses()
        draft = next(node for node in nodes if node.role == "draft")
        state = {
            "model": draft.model,
            "context_length": draft.context_length,
            "defaults": draft.defaults,
            "missing": _missing(nodes),
            "nodes": [_node_state(node) for node in nodes],
            "served_as": self.model,
            "places": {"taken": self.concurrency.taken, "most": self.options.limits.concurrent},
        }
        return json_response(state)

    async def _statuses(self) -> tuple[Status, ...]:
        """Status of every reachable node. Raises ``ClusterError``."""
        try:
            async with asyncio.timeout(STATUS_SECONDS):
                return await self.engine.nodes()
        except TimeoutError:
            raise ClusterError(
                f"the nodes do not say how they are in {STATUS_SECONDS:g} s"
            ) from None

    async def _models(self, request: web.Request) -> web.Response:
        _ = self.engine  # while loading, no model is served
        return json_response({"object": "list", "data": [self._model_object(self.model)]})

    async def _model(self, request: web.Request) -> web.Response:
        _ = self.engine
        return json_response(self._model_object(request.match_info["name"]))


def _missing(nodes: Sequence[Status]) -> str:
    """Why no request can be served now: what the draft node lacks, and the stages' reasons for
    links they cannot make. Empty where one can."""
    draft = next((node for node in nodes if node.role == "draft"), None)
    if draft is None:
        return "the draft node does not answer"
    reasons = [draft.missing, *(node.missing for node in nodes if node.role != "draft")]
    return "; ".join(filter(None, dict.fromkeys(reasons))) if draft.missing else ""


def _node_state(node: Status) -> dict[str, object]:
    links = zip(node.peers, node.round_trips, node.sent, strict=True)
    names = ("rank", "role", "layers", "up_seconds", "busy_seconds", "memory_bytes")
    return {
        **{name: getattr(node, name) for name in (*names, "sessions", "waiting", "slots", "room")},
        "links": [
            {"peer": peer, "round_trip": None if rtt < 0 else rtt, "bytes_sent": sent}
            for peer, rtt, sent in links
        ],
    }


def _check_prompts(call: Completion, most: int) -> None:
    """Raises ``ApiError`` for a prompt of more than ``most`` characters or tokens."""
    for submit in call.submits:
        length = max(len(submit.prompt), len(submit.chat), len(submit.prompt_ids))
        if length > most:
            text = f"the prompt has {length} characters or tokens; at most {most} are taken"
            raise invalid(text, call.prompt_name, "prompt_too_long")
