"""The routes of the HTTP service, and what it reports of the cluster behind it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from aiohttp import web

from asyncspec_nodes.http import site
from asyncspec_nodes.http.access import ServiceOptions
from asyncspec_nodes.http.api.answers import RequestContext
from asyncspec_nodes.http.api.completions import ChatRequest, Completion, CompletionRequest
from asyncspec_nodes.http.api.errors import ApiError, invalid
from asyncspec_nodes.http.api.parameters import parse
from asyncspec_nodes.http.limits import ConcurrencyLimit
from asyncspec_nodes.http.middleware import REQUEST_ID, json_response, read_body
from asyncspec_nodes.http.probes import Probes
from asyncspec_nodes.http.streaming import EngineClient, Responder
from asyncspec_protocol.messages import Status


class Service(Probes):
    """One HTTP service over one cluster, which serves one model under its public name. Make it
    inside a running event loop.

    Until ``serve`` is called it is loading: ``/health`` answers, everything else is a 503 that
    includes ``pending()``."""

    def __init__(
        self, options: ServiceOptions, pending: Callable[[], str], log: Any = None
    ) -> None:
        super().__init__(options, pending, log)
        self._engine: EngineClient | None = None
        self.model = ""
        self.concurrency = ConcurrencyLimit(options.limits.concurrent)

    @property
    def engine(self) -> EngineClient:
        """Raises ``ApiError`` while the service is loading."""
        if self._engine is None:
            raise self.loading()
        return self._engine

    def serve(self, engine: EngineClient, model: str) -> None:
        """End loading: ``engine`` serves requests for the model named ``model``."""
        self.report(engine.nodes)
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
        app = super().app()
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
                id=REQUEST_ID.get(),
                created=int(time.time()),
            )
            call = fields.call(context)
            _check_prompts(call, limits.prompt_length)
            with self.concurrency.acquire(len(call.submits)):
                responder = Responder(call, engine, self.shutdown, limits)
                return await responder.respond(request)

    async def _state(self, request: web.Request) -> web.Response:
        nodes = await self.statuses()
        draft = next(node for node in nodes if node.role == "draft")
        state = {
            "model": draft.model,
            "context_length": draft.context_length,
            "defaults": draft.defaults,
            "draft": draft.draft,
            "missing": self.missing(nodes),
            "nodes": [_node_state(node) for node in nodes],
            "served_as": self.model,
            "places": {"taken": self.concurrency.taken, "most": self.options.limits.concurrent},
        }
        return json_response(state)

    def missing(self, nodes: Sequence[Status]) -> str:
        """Why no request can be served now: what the draft node lacks, and the stages' reasons for
        links they cannot make. Empty where one can."""
        draft = next((node for node in nodes if node.role == "draft"), None)
        if draft is None:
            return "the draft node does not answer"
        reasons = [draft.missing, *(node.missing for node in nodes if node.role != "draft")]
        return "; ".join(filter(None, dict.fromkeys(reasons))) if draft.missing else ""

    def served_model(self) -> str:
        return self.model

    async def _models(self, request: web.Request) -> web.Response:
        _ = self.engine  # while loading, no model is served
        return json_response({"object": "list", "data": [self._model_object(self.model)]})

    async def _model(self, request: web.Request) -> web.Response:
        _ = self.engine
        return json_response(self._model_object(request.match_info["name"]))


def _node_state(node: Status) -> dict[str, object]:
    links = zip(node.peers, node.round_trips, node.sent, strict=True)
    names = ("rank", "role", "host", "layers", "up_seconds", "busy_seconds", "memory_bytes")
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
