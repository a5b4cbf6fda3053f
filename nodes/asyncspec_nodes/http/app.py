"""The routes of the HTTP service, and what it reports of the cluster behind it."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

from aiohttp import web
from msgspec.structs import replace

from asyncspec_nodes.http import site
from asyncspec_nodes.http.access import ServiceOptions
from asyncspec_nodes.http.api.answers import ChoiceBuffer, RequestContext
from asyncspec_nodes.http.api.chat import ChatRequest
from asyncspec_nodes.http.api.completions import CompletionRequest
from asyncspec_nodes.http.api.errors import ApiError, invalid
from asyncspec_nodes.http.api.parameters import parse
from asyncspec_nodes.http.foreign.anthropic import MessagesRequest
from asyncspec_nodes.http.foreign.ollama import GenerateRequest, OllamaChatRequest
from asyncspec_nodes.http.foreign.ollama_models import ShowRequest, model_object, running, shown
from asyncspec_nodes.http.foreign.openapi import description
from asyncspec_nodes.http.foreign.prompts import CountRequest, DetokenizeRequest, TokenizeRequest
from asyncspec_nodes.http.foreign.responses import ResponsesRequest
from asyncspec_nodes.http.limits import ConcurrencyLimit
from asyncspec_nodes.http.middleware import (
    CALLER,
    REQUEST_ID,
    json_response,
    read_body,
)
from asyncspec_nodes.http.probes import Probes
from asyncspec_nodes.http.streaming import (
    EngineClient,
    PromptParameter,
    Responder,
    answer_time,
    error_of,
)
from asyncspec_nodes.serving.templates import ChatFacts
from asyncspec_protocol.messages import Output, Status, Submit
from asyncspec_protocol.sampling import UNCONSTRAINED

ENDPOINTS: dict[str, type[Any]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/api/chat": OllamaChatRequest,
    "/api/generate": GenerateRequest,
}
"""Routes that answer, and their bodies."""

MAX_NAMES = 16
"""Of what is left out of a request, in its line."""

OLLAMA_VERSION = "0.12.0"


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
        self._facts: ChatFacts | None = None
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

    async def _described(self, name: str) -> dict[str, object]:
        """A ``_model_object`` with its context, under the names by which clients look for it."""
        model, length = self._model_object(name), await self._context_length()
        return {**model, "context_window": length, "max_model_len": length} if length else model

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_get("/state", self._state)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        for path, kind in ENDPOINTS.items():
            app.router.add_post(path, partial(self._answer, kind))
        app.router.add_get("/api/version", self._ollama_version)
        app.router.add_get("/api/tags", self._tags)
        app.router.add_get("/api/ps", self._running)
        app.router.add_post("/api/show", self._show)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_get("/openapi.json", self._openapi)
        app.router.add_get("/version", self._version)
        site.add_routes(app)
        return app

    async def _answer(self, kind: type[Any], request: web.Request) -> web.StreamResponse:
        with self.shutdown.track():
            engine, limits = self.engine, self.options.limits
            async with self.shutdown.interruptible():
                body = await read_body(request, limits)
            fields = parse(body, kind, self._note)
            context = await self._context(request, fields.model)
            call = fields.call(context)
            if not call.submits:
                return json_response(call.body(()))
            _check_prompts(call.submits, call.prompt_name, limits.prompt_length)
            caller, count = CALLER.get(), len(call.submits)
            responder = Responder(call, engine, self.shutdown, limits)
            expected = responder.tokens
            with self.concurrency.acquire(count), caller.admit(count, expected):
                try:
                    return await responder.respond(request)
                finally:
                    used = responder.tokens
                    caller.spend(used - expected)
                    if caller.name:
                        self.metrics.key_used(caller.name, used)

    def _note(self, names: Sequence[str]) -> None:
        """One line for what a request asks for besides, and is left out."""
        shown = [*names[:MAX_NAMES], *(["..."] if len(names) > MAX_NAMES else [])]
        self.log.info("left out", names=", ".join(shown), request=REQUEST_ID.get())

    async def _openapi(self, request: web.Request) -> web.Response:
        return json_response(description(ENDPOINTS, version("asyncspec")))

    async def _tokenize(self, request: web.Request) -> web.Response:
        """Tokens of a prompt or a conversation, as a request with it would read them."""
        body = await read_body(request, self.options.limits)
        fields = parse(body, TokenizeRequest, self._note)
        asked = await self._context(request, fields.model)
        tokens = (await self._prompt(fields.submit(asked), "prompt")).tokens
        return json_response({"count": len(tokens), "tokens": tokens})

    async def _detokenize(self, request: web.Request) -> web.Response:
        fields = parse(await read_body(request, self.options.limits), DetokenizeRequest)
        asked = await self._context(request, fields.model)
        return json_response({"prompt": (await self._prompt(fields.submit(asked), "tokens")).text})

    async def _count_tokens(self, request: web.Request) -> web.Response:
        fields = parse(await read_body(request, self.options.limits), CountRequest, self._note)
        asked = await self._context(request, fields.model)
        submit = fields.chat(asked.facts).prepared(asked)
        submit = replace(submit, prompt_only=True, constraint=UNCONSTRAINED)
        tokens = (await self._prompt(submit, "messages")).tokens
        return json_response({"input_tokens": len(tokens)})

    async def _prompt(self, submit: Submit, name: str) -> ChoiceBuffer:
        """What the draft node reads of a prompt. Raises ``ApiError``."""
        limits, shutdown, found = self.options.limits, self.shutdown, ChoiceBuffer()
        _check_prompts([submit], name, limits.prompt_length)
        with shutdown.track(), self.concurrency.acquire(1), CALLER.get().admit(1):
            async with (
                answer_time(limits, shutdown),
                contextlib.aclosing(self.engine.ask(submit)) as events,
            ):
                async for event in events:
                    if isinstance(event, Output):
                        found.add(event)
                    elif (error := error_of(event, PromptParameter(name))) is not None:
                        raise error
        return found

    async def _context(self, request: web.Request, model: str | None) -> RequestContext:
        """Of a request for the model ``model``. Raises ``ApiError``."""
        # Ollama's clients add the tag of what they take for the newest.
        self._model_object((model or self.model).removesuffix(":latest"))
        return RequestContext(
            seed=secrets.randbits(53),  # fits any JSON number
            tenant=CALLER.get().tenant,
            model=self.model,
            id=REQUEST_ID.get(),
            created=int(time.time()),
            facts=await self._chat_facts(),
        )

    async def _chat_facts(self) -> ChatFacts:
        """Of the target's chat template, asked once. Raises ``ClusterError``."""
        if self._facts is None:
            draft = _draft_of(await self.statuses())
            if draft is None:
                return ChatFacts()
            self._facts = ChatFacts(
                draft.tool_syntax or "json",
                draft.takes_tools,
                draft.reasoning,
                draft.template_options,
            )
        return self._facts

    async def _version(self, request: web.Request) -> web.Response:
        return json_response({"version": version("asyncspec")})

    async def _ollama_version(self, request: web.Request) -> web.Response:
        """Of the interface, by which its clients decide what they may ask."""
        return json_response({"version": OLLAMA_VERSION})

    async def _tags(self, request: web.Request) -> web.Response:
        _ = self.engine
        return json_response({"models": [self._ollama_model()]})

    async def _running(self, request: web.Request) -> web.Response:
        length = await self._context_length()
        return json_response({"models": [running(self._ollama_model(), length)]})

    async def _show(self, request: web.Request) -> web.Response:
        _ = self.engine
        fields = parse(await read_body(request, self.options.limits), ShowRequest)
        name = fields.model or fields.name or self.model
        self._model_object(name.removesuffix(":latest"))
        reasons = bool((await self._chat_facts()).reasoning)
        length = await self._context_length()
        return json_response(shown(self._ollama_model(), length, reasoning=reasons))

    def _ollama_model(self) -> dict[str, object]:
        return model_object(self.model, self._created)

    async def _context_length(self) -> int:
        """In tokens; 0 where the draft node does not answer. Raises ``ClusterError``."""
        draft = _draft_of(await self.statuses())
        return 0 if draft is None else draft.context_length

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
        draft = _draft_of(nodes)
        if draft is None:
            return "the draft node does not answer"
        reasons = [draft.missing, *(node.missing for node in nodes if node.role != "draft")]
        return "; ".join(filter(None, dict.fromkeys(reasons))) if draft.missing else ""

    def served_model(self) -> str:
        return self.model

    async def _models(self, request: web.Request) -> web.Response:
        _ = self.engine  # while loading, no model is served
        return json_response({"object": "list", "data": [await self._described(self.model)]})

    async def _model(self, request: web.Request) -> web.Response:
        _ = self.engine
        return json_response(await self._described(request.match_info["name"]))


def _draft_of(nodes: Sequence[Status]) -> Status | None:
    return next((node for node in nodes if node.role == "draft"), None)


def _node_state(node: Status) -> dict[str, object]:
    links = zip(node.peers, node.round_trips, node.sent, strict=True)
    names = ("rank", "role", "host", "device", "layers", "up_seconds", "busy_seconds")
    memory = ("memory_bytes", "device_held_bytes", "device_free_bytes")
    counts = ("sessions", "waiting", "slots", "room")
    return {
        **{name: getattr(node, name) for name in (*names, *memory, *counts)},
        "links": [
            {"peer": peer, "round_trip": None if rtt < 0 else rtt, "bytes_sent": sent}
            for peer, rtt, sent in links
        ],
    }


def _check_prompts(submits: Sequence[Submit], name: str, most: int) -> None:
    """Raises ``ApiError`` for a prompt of more than ``most`` characters or tokens. ``name``: of its
    parameter."""
    for submit in submits:
        length = max(len(submit.prompt), len(submit.chat), len(submit.prompt_ids))
        if length > most:
            text = f"the prompt has {length} characters or tokens; at most {most} are taken"
            raise invalid(text, name, "prompt_too_long")
