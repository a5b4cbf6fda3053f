"""The dialects of other programs, as the registry has them, and their routes that do not answer."""

from __future__ import annotations

from functools import partial

from aiohttp import web
from msgspec.structs import replace

from asyncspec_nodes.http.api.parameters import parse
from asyncspec_nodes.http.dialects import Dialect, ServiceView
from asyncspec_nodes.http.middleware import json_response, read_body
from asyncspec_nodes.plugins.dialects.anthropic import MessagesRequest
from asyncspec_nodes.plugins.dialects.ollama import GenerateRequest, OllamaChatRequest
from asyncspec_nodes.plugins.dialects.ollama_models import (
    ModelRequest,
    model_object,
    running,
    shown,
)
from asyncspec_nodes.plugins.dialects.prompts import (
    CountRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from asyncspec_nodes.plugins.dialects.responses import ResponsesRequest
from asyncspec_protocol.sampling import UNCONSTRAINED

OLLAMA_VERSION = "0.12.0"
"""The version of the interface, by which Ollama's clients decide what they may ask."""


async def _count_tokens(service: ServiceView, request: web.Request) -> web.Response:
    body = await read_body(request, service.options.limits)
    fields = await service.beside(body, partial(parse, body, CountRequest, service.note))
    context = await service.context(request, fields.model)
    submit = await service.beside(body, lambda: fields.chat(context.facts).prepared(context))
    submit = replace(submit, prompt_only=True, constraint=UNCONSTRAINED)
    tokens = (await service.read_prompt(submit, "messages")).tokens
    return json_response({"input_tokens": len(tokens)})


async def _tokenize(service: ServiceView, request: web.Request) -> web.Response:
    """Tokens of a prompt or a conversation, as a request with it would read them."""
    body = await read_body(request, service.options.limits)
    fields = await service.beside(body, partial(parse, body, TokenizeRequest, service.note))
    context = await service.context(request, fields.model)
    submit = await service.beside(body, partial(fields.submit, context))
    tokens = (await service.read_prompt(submit, "prompt")).tokens
    return json_response({"count": len(tokens), "tokens": tokens})


async def _detokenize(service: ServiceView, request: web.Request) -> web.Response:
    body = await read_body(request, service.options.limits)
    fields = await service.beside(body, partial(parse, body, DetokenizeRequest))
    context = await service.context(request, fields.model)
    prompt = await service.read_prompt(fields.submit(context), "tokens")
    # Under vLLM's name and llama.cpp's.
    return json_response({"prompt": prompt.text, "content": prompt.text})


async def _props(service: ServiceView, request: web.Request) -> web.Response:
    """The model as llama.cpp describes it."""
    service.check_loaded()
    described = {
        "model_alias": service.model,
        "total_slots": service.options.limits.concurrent,
        "default_generation_settings": {"n_ctx": await service.context_length()},
        "modalities": {"vision": False, "audio": False},
    }
    return json_response(described)


async def _ollama_version(service: ServiceView, request: web.Request) -> web.Response:
    return json_response({"version": OLLAMA_VERSION})


async def _tags(service: ServiceView, request: web.Request) -> web.Response:
    service.check_loaded()
    models = [model_object(name, service.created) for name in service.models]
    return json_response({"models": models})


async def _running(service: ServiceView, request: web.Request) -> web.Response:
    model = model_object(service.model, service.created)
    return json_response({"models": [running(model, await service.context_length())]})


async def _check_named(service: ServiceView, request: web.Request) -> None:
    """Raises ``ApiError`` where the model that a body names is not served."""
    service.check_loaded()
    body = await read_body(request, service.options.limits)
    fields = await service.beside(body, partial(parse, body, ModelRequest, service.note))
    service.check_model(fields.model or fields.name or service.model)


async def _pull(service: ServiceView, request: web.Request) -> web.Response:
    """As where the model is there already: clients pull it before they chat."""
    await _check_named(service, request)
    return json_response({"status": "success"})


async def _show(service: ServiceView, request: web.Request) -> web.Response:
    await _check_named(service, request)
    reasons = bool((await service.chat_facts()).reasoning)
    model = model_object(service.model, service.created)
    return json_response(shown(model, await service.context_length(), reasoning=reasons))


ANTHROPIC = Dialect(
    endpoints={"/v1/messages": MessagesRequest},
    routes={("POST", "/v1/messages/count_tokens"): _count_tokens},
)
OLLAMA = Dialect(
    endpoints={"/api/chat": OllamaChatRequest, "/api/generate": GenerateRequest},
    routes={
        ("GET", "/api/version"): _ollama_version,
        ("GET", "/api/tags"): _tags,
        ("GET", "/api/ps"): _running,
        ("POST", "/api/show"): _show,
        ("POST", "/api/pull"): _pull,
    },
)
RESPONSES = Dialect(endpoints={"/v1/responses": ResponsesRequest})
TOKENIZE = Dialect(
    routes={
        ("POST", "/tokenize"): _tokenize,
        ("POST", "/detokenize"): _detokenize,
        ("GET", "/props"): _props,
    }
)
