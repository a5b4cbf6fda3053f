"""Any JSON value in any field of a valid body gives a call or an error 400, and what a call makes
of an answer can be written; for every endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.constraint.bounds import MAX_LEVELS
from asyncspec.testing.dialects import (
    DEEP,
    FACTS,
    HERE,
    check_dialect,
    check_error,
    filled,
    nested,
    places,
    template,
    values,
)
from asyncspec_nodes.http.api.answers import RequestContext
from asyncspec_nodes.http.api.chat import ChatRequest
from asyncspec_nodes.http.api.errors import ApiError
from asyncspec_nodes.http.api.parameters import parse
from asyncspec_nodes.http.dialects import DIALECTS, endpoints
from asyncspec_nodes.plugins.dialects.anthropic import MessagesRequest
from asyncspec_nodes.plugins.dialects.prompts import (
    CountRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from asyncspec_nodes.plugins.dialects.responses import ResponsesRequest
from asyncspec_nodes.serving.templates import ChatFacts
from effort import examples

ENDPOINTS = endpoints(DIALECTS.values())
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, OLLAMA, GENERATE = "/v1/messages", "/api/chat", "/api/generate"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "$defs": {"a": {}},
    "definitions": {},
}
FUNCTION = {"name": "f", "description": "d", "parameters": PARAMETERS, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
SETTINGS: dict[str, Any] = {
    "model": "m",
    "temperature": 1,
    "top_p": 1,
    "n": 1,
    "best_of": 1,
    "stop": ["x"],
    "seed": 3,
    "logit_bias": {"1": 1},
    "min_tokens": 1,
    "max_tokens": 9,
    "given_token_ids": [1],
    "user": "u",
    "service_tier": "auto",
    "policy": "flowspec",
}
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
ECHO = {**SETTINGS, "given_token_ids": None, "echo": True}
HISTORY = [
    {"role": "system", "content": "x"},
    {"role": "user", "content": [{"type": "text", "text": "x"}]},
    {"role": "assistant", "content": "x", "reasoning_content": "r", "tool_calls": CALLS},
    {"role": "tool", "content": "x", "tool_call_id": "1"},
]
NAMED = {"type": "function", "function": {"name": "f"}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {**ECHO, "prompt": ["x"], "guided_json": {"type": "object"}}),
    (TEXT, {**SETTINGS, "prompt": [1, 2], "structured_outputs": {"json": {}}, "logprobs": 1}),
    (TEXT, {**SETTINGS, "prompt": "x", "guided_choice": ["a"], "stream": False}),
    (TEXT, {**SETTINGS, "prompt": "x", "guided_grammar": 'start: "a"', "return_details": True}),
    (CHAT, {**SETTINGS, "messages": HISTORY, "tools": [TOOL], "tool_choice": NAMED}),
    (
        CHAT,
        {
            **SETTINGS,
            "messages": HISTORY,
            "chat_template_kwargs": {"a": 1},
            "reasoning_effort": "low",
            "response_format": {"type": "json_schema", "json_schema": {"schema": PARAMETERS}},
        },
    ),
    (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "x"},
            ],
            "instructions": "x",
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": "required",
            "include": ["reasoning.encrypted_content"],
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": None},
            "metadata": {},
        },
    ),
    (RESPONSES, {"input": "x", "text": {"format": {"type": "json_schema", "schema": {}}}}),
    (
        MESSAGES,
        {
            "max_tokens": 9,
            "system": [{"type": "text", "text": "x"}],
            "messages": [
                {"role": "user", "content": "x"},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}],
                },
            ],
            "tools": [{"name": "f", "input_schema": PARAMETERS}],
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled"},
            "context_management": {"edits": []},
            "output_config": {"effort": "max"},
            "metadata": {},
        },
    ),
    (
        OLLAMA,
        {
            "messages": [
                {"role": "user", "content": "x"},
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"a": 1}}}],
                },
                {"role": "tool", "content": "x", "tool_name": "f", "tool_call_id": "1"},
            ],
            "tools": [TOOL],
            "format": {"type": "object"},
            "options": {"num_predict": 5, "temperature": 1, "num_ctx": 5, "seed": 1, "stop": "x"},
            "think": None,
            "stream": False,
        },
    ),
    (OLLAMA, {"messages": [], "tools": [TOOL], "keep_alive": "5m", "options": {"num_ctx": 5}}),
    (GENERATE, {"prompt": "x", "system": "x", "format": "json", "options": {"num_predict": -1}}),
]
KINDS: dict[str, type[Any]] = {
    **ENDPOINTS,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/messages/count_tokens": CountRequest,
}
BODIES += [
    ("/tokenize", {"messages": HISTORY, "tools": [TOOL]}),
    ("/tokenize", {"prompt": "x"}),
    ("/detokenize", {"tokens": [1, 2]}),
    ("/v1/messages/count_tokens", {name: v for name, v in BODIES[8][1].items() if v != 9}),
]


def asked(path: str, body: bytes, facts: ChatFacts) -> Any:
    """What a body asks of the cluster. Raises ``ApiError``."""
    fields = parse(body, KINDS[path])
    context = RequestContext(seed=5, id="i", model="m", facts=facts)
    if isinstance(fields, CountRequest):
        return fields.chat(facts).prepared(context)
    return fields.call(context) if path in ENDPOINTS else fields.submit(context)


def error_of(path: str, body: bytes, facts: ChatFacts) -> ApiError | None:
    """Why a body asks for nothing."""
    try:
        asked(path, body, facts)
    except ApiError as error:
        return error
    return None


def test_the_bodies_are_valid() -> None:
    """Without a template that takes tools, and with one of each kind."""
    for path, body in BODIES:
        errors = [error_of(path, json.dumps(body).encode(), facts) for facts in FACTS]
        assert None in errors
        assert all(error is None or error.param == "reasoning_effort" for error in errors)


bodies = st.sampled_from(
    [
        (path, template(body, place))
        for path, body in BODIES
        if path not in ENDPOINTS
        for place in places(body)
    ]
)


@given(bodies, values, st.sampled_from(FACTS))
def test_any_value_in_any_field_is_a_call_or_an_error(
    body: tuple[str, str], value: str, facts: ChatFacts
) -> None:
    path, text = body
    check_error(error_of(path, filled(text, value), facts))


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_conforms(name: str) -> None:
    dialect = DIALECTS[name]
    bodies = {path: [body for at, body in BODIES if at == path] for path in dialect.endpoints}
    check_dialect(dialect, bodies, examples(2000, quick=150))


LEAST: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "x"},
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
    RESPONSES: {"input": "x"},
    MESSAGES: {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]},
    OLLAMA: {"messages": [{"role": "user", "content": "x"}]},
    GENERATE: {"prompt": "x"},
}
FORCED: dict[type[Any], Any] = {
    ChatRequest: lambda p: {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": p}}],
        "tool_choice": "required",
    },
    ResponsesRequest: lambda p: {
        "tools": [{"type": "function", "name": "f", "parameters": p}],
        "tool_choice": "required",
    },
    MessagesRequest: lambda p: {
        "tools": [{"name": "f", "input_schema": p}],
        "tool_choice": {"type": "any"},
    },
}


def refused() -> Iterator[Any]:
    limits: list[Any] = ["5", [1], {}, True, 5.5]
    for limit in limits:
        for path in (OLLAMA, GENERATE):
            yield path, {"options": {"num_predict": limit}}
    for kind, ask in FORCED.items():
        path = next(path for path, one in ENDPOINTS.items() if one is kind)
        for name in ("$defs", "definitions"):
            for wrong in (None, 5, [1], "x"):
                yield path, ask({"type": "object", name: wrong})
    for text in ("5", "[1]", "null", '"x"', "[" * 3000, "{"):
        for path in (CHAT, TEXT):
            yield path, {"guided_json": text}
            yield path, {"structured_outputs": {"json": text}}
    for token in ("9" * 4301, "9" * 11, str(2**31), "-1", "x", ""):
        yield CHAT, {"logit_bias": {token: 1}}


@pytest.mark.parametrize(("path", "more"), list(refused()))
def test_what_is_refused(path: str, more: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        asked(path, json.dumps({**LEAST[path], **more}).encode(), FACTS[0])
    assert caught.value.status == 400
    assert caught.value.param
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("facts", FACTS)
@pytest.mark.parametrize("text", [*DEEP[-4:], "{", "[1]", "5"])
def test_a_call_of_a_history_may_be_malformed(text: str, facts: ChatFacts) -> None:
    """A model wrote it, and the user cannot change it."""
    calls = [{"function": {"name": "f", "arguments": text}}]
    said = {"role": "assistant", "content": "x", "tool_calls": calls}
    for path, body in (
        (CHAT, {"messages": [said]}),
        (RESPONSES, {"input": [{"type": "function_call", "name": "f", "arguments": text}]}),
    ):
        (submit,) = asked(path, json.dumps(body).encode(), facts).submits
        assert "INVALID_JSON" in submit.chat


LIMITS = {RESPONSES: "max_output_tokens", OLLAMA: "num_predict", GENERATE: "num_predict"}


@pytest.mark.parametrize("path", LEAST)
def test_a_float_that_is_whole_is_an_integer(path: str) -> None:
    limit = {LIMITS.get(path, "max_tokens"): 7.0}
    more = {"options": limit} if path in (OLLAMA, GENERATE) else limit
    call = asked(path, json.dumps({**LEAST[path], **more}).encode(), FACTS[0])
    assert call.submits[0].max_new_tokens == 7


@pytest.mark.parametrize("path", LEAST)
def test_a_limit_of_null_is_none(path: str) -> None:
    none = {"num_predict": None, "mirostat": None}
    more: dict[str, Any] = {"options": none} if path in (OLLAMA, GENERATE) else {"stream": None}
    asked(path, json.dumps({**LEAST[path], **more}).encode(), FACTS[0])


@pytest.mark.parametrize("levels", [MAX_LEVELS, MAX_LEVELS + 1, 950, 100_000])
@pytest.mark.parametrize("around", [("[", "]"), ('{"a":', "}")])
def test_how_deep_a_body_may_be(levels: int, around: tuple[str, str]) -> None:
    inner = nested(levels - 1, *around)
    body = json.dumps({**LEAST[CHAT], "metadata": HERE}).replace(json.dumps(HERE), inner)
    if levels <= MAX_LEVELS:
        asked(CHAT, body.encode(), FACTS[0])
        return
    with pytest.raises(ApiError, match=f"at most {MAX_LEVELS} levels"):
        asked(CHAT, body.encode(), FACTS[0])
