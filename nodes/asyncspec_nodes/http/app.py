"""The routes of the HTTP service, and what it reports of the cluster behind it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

from aiohttp import web

from asyncspec_nodes.http.access import ServiceOptions
from asyncspec_nodes.http.api.answers import ChoiceBuffer, RequestContext
from asyncspec_nodes.http.api.errors import ApiError, invalid
from asyncspec_nodes.http.api.parameters import parse
from asyncspec_nodes.http.dialects import DIALECTS, endpoints
from asyncspec_nodes.http.limits import ConcurrencyLimit
from asyncspec_nodes.http.metrics import LEARNED
from asyncspec_nodes.http.middleware import (
    CALLER,
    REQUEST_ID,
    json_response,
    read_body,
)
from asyncspec_nodes.http.openapi import description
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

SHORT_BODY = 16 * 1024
"""Bytes of a body that are read in a few milliseconds, whatever they say; a JSON schema of 256 KiB
takes a second."""

T = TypeVar("T")

MAX_NAMES = 16
"""Names of what is left out of a request, in its line."""


class Service(Probes):
    """One HTTP service over one cluster, which serves one model under its public names. Make it
    inside a running event loop.

    Until ``serve`` is called it is loading: ``/health`` answers, everything else is a 503 that
    includes ``pending()``."""

    def __init__(
        self, options: ServiceOptions, pending: Callable[[], str], log: Any = None
    ) -> None:
        super().__init__(options, pending, log)
        self._engine: EngineClient | None = None
        self.models: tuple[str, ...] = ("",)
        self._facts: ChatFacts | None = None
        self.concurrency = ConcurrencyLimit(options.limits.concurrent)
        # Starts its thread with the first large body.
        self._reading = ThreadPoolExecutor(1, "bodies")
        dialects, problems = DIALECTS.usable()
        for problem in problems:
            self.log.warning("dialect left out", problem=problem)
        self._dialects = tuple(dialects.values())

    @property
    def public_routes(self) -> frozenset[str]:
        return frozenset().union(*(dialect.public for dialect in self._dialects))

    @property
    def engine(self) -> EngineClient:
        """Raises ``ApiError`` while the service is loading."""
        if self._engine is None:
            raise self.loading()
        return self._engine

    def check_loaded(self) -> None:
        """Raises ``ApiError`` while the service is loading: no model is served yet."""
        _ = self.engine

    @property
    def model(self) -> str:
        """The name that answers state; empty while the service is loading."""
        return self.models[0]

    def serve(self, engine: EngineClient, model: str, *aliases: str) -> None:
        """End loading: ``engine`` serves requests for the model named ``model``, or by one of its
        ``aliases``."""
        self.report(engine.nodes)
        self._engine = engine
        self.models = (model, *aliases)
        self.created = int(time.time())

    def check_model(self, name: str) -> None:
        """Raises ``ApiError`` for another model's name."""
        # Ollama's clients add the tag of what they take for the newest.
        if name not in self.models and name.removesuffix(":latest") not in self.models:
            names = " and ".join(map(repr, self.models))
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this service has {names}",
                param="model",
                code="model_not_found",
            )

    def _model_object(self, name: str) -> dict[str, object]:
        """The JSON object of ``GET /v1/models/NAME``. Raises ``ApiError`` for another model."""
        self.check_model(name)
        return {"id": name, "object": "model", "created": self.created, "owned_by": "asyncspec"}

    async def _described(self, name: str) -> dict[str, object]:
        """A ``_model_object`` with its context, under the names by which clients look for it."""
        model, length = self._model_object(name), await self.context_length()
        return {**model, "context_window": length, "max_model_len": length} if length else model

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_get("/state", self._state)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        for dialect in self._dialects:
            for path, body in dialect.endpoints.items():
                app.router.add_post(path, partial(self._answer, body))
            for (method, path), handler in dialect.routes.items():
                # As aiohttp's own ``add_get``: a route for GET answers HEAD.
                methods = ("HEAD", "GET") if method == "GET" else (method,)
                for name in methods:
                    app.router.add_route(name, path, partial(handler, self))
        app.router.add_get("/openapi.json", self._openapi)
        app.router.add_get("/version", self._version)
        return app

    async def _answer(self, kind: type[Any], request: web.Request) -> web.StreamResponse:
        with self.shutdown.track():
            engine, limits = self.engine, self.options.limits
            async with self.shutdown.interruptible():
                body = await read_body(request, limits)
            fields = await self.beside(body, partial(parse, body, kind, self.note))
            context = await self.context(request, fields.model)
            call = await self.beside(body, partial(fields.call, context))
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
                    caller.blame(responder.broken)
                    if caller.name:
                        self.metrics.key_used(caller.name, used)

    async def beside(self, body: bytes, work: Callable[[], T]) -> T:
        """See ``ServiceView``. One thread for all: Python gives the event loop its turn after a few
        milliseconds, but after as many of each other thread that is at work."""
        if len(body) <= SHORT_BODY:
            return work()
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        return await loop.run_in_executor(self._reading, context.run, work)

    def note(self, names: Sequence[str]) -> None:
        """One line for what a request asks for besides, and is left out."""
        shown = [*names[:MAX_NAMES], *(["..."] if len(names) > MAX_NAMES else [])]
        self.log.info("left out", names=", ".join(shown), request=REQUEST_ID.get())

    async def _openapi(self, request: web.Request) -> web.Response:
        return json_response(description(endpoints(self._dialects), version("asyncspec")))

    async def read_prompt(self, submit: Submit, name: str) -> ChoiceBuffer:
        """What the draft node reads of a prompt. Raises ``ApiError``."""
        limits, shutdown, prompt = self.options.limits, self.shutdown, ChoiceBuffer()
        _check_prompts([submit], name, limits.prompt_length)
        with shutdown.track(), self.concurrency.acquire(1), CALLER.get().admit(1):
            async with (
                answer_time(limits, shutdown),
                contextlib.aclosing(self.engine.ask(submit)) as events,
            ):
                async for event in events:
                    if isinstance(event, Output):
                        prompt.add(event)
                    elif (error := error_of(event, PromptParameter(name))) is not None:
                        raise error
        return prompt

    async def context(self, request: web.Request, model: str | None) -> RequestContext:
        """The context of a request for the model ``model``. Raises ``ApiError``."""
        self.check_model(model or self.model)
        return RequestContext(
            seed=secrets.randbits(53),  # fits any JSON number
            tenant=CALLER.get().tenant,
            model=self.model,
            id=REQUEST_ID.get(),
            created=int(time.time()),
            facts=await self.chat_facts(),
            note=self.note,
        )

    async def chat_facts(self) -> ChatFacts:
        """What the target's chat template can do, asked once. Raises ``ClusterError``."""
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

    async def context_length(self) -> int:
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
        self.check_loaded()
        data = [await self._described(name) for name in self.models]
        return json_response({"object": "list", "data": data})

    async def _model(self, request: web.Request) -> web.Response:
        self.check_loaded()
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
        **{name: node.totals[name] for name in LEARNED if name in node.totals},
        "links": [
            {"peer": peer, "round_trip": None if rtt < 0 else rtt, "bytes_sent": sent}
            for peer, rtt, sent in links
        ],
    }


def _check_prompts(submits: Sequence[Submit], name: str, max_length: int) -> None:
    """Raises ``ApiError`` for a prompt of more than ``max_length`` characters or tokens. ``name``:
    its parameter."""
    for submit in submits:
        length = max(len(submit.prompt), len(submit.chat), len(submit.prompt_ids))
        if length > max_length:
            text = f"the prompt has {length} characters or tokens; at most {max_length} are taken"
            raise invalid(text, name, "prompt_too_long")
