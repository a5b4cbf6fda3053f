"""Bodies drawn from the schemas of all routes, some with a wrong value in them: a toy cluster
answers each, in its dialect's form, and no answer is a mistake of the service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.testing.dialects import filled, places, template, values
from asyncspec_nodes.http.api.errors import DONE
from asyncspec_nodes.http.dialects import DIALECTS, endpoints
from asyncspec_nodes.plugins.dialects.ollama_models import ModelRequest
from asyncspec_nodes.plugins.dialects.prompts import (
    CountRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from asyncspec_nodes.serving.templates import ChatFacts
from effort import examples
from toy_service import RULES, Toy

SECONDS = 60
BODIES: Mapping[str, type[Any]] = {
    **endpoints(DIALECTS.values()),
    "/v1/messages/count_tokens": CountRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/api/show": ModelRequest,
    "/api/pull": ModelRequest,
}
USER = {"role": "user", "content": "Rome"}
TURN, PROMPT = {"messages": [USER]}, {"prompt": "Rome"}
SOUND: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": TURN,
    "/v1/completions": PROMPT,
    "/chat/completions": TURN,
    "/completions": PROMPT,
    "/v1/responses": {"input": "Rome"},
    "/v1/messages": {"max_tokens": 9, **TURN},
    "/v1/messages/count_tokens": TURN,
    "/api/chat": TURN,
    "/api/generate": PROMPT,
    "/api/show": {"model": "toy"},
    "/api/pull": {"model": "toy"},
    "/tokenize": PROMPT,
    "/detokenize": {"tokens": [1, 2]},
}
"""Bodies that are answered."""

SCHEMAS, COMPONENTS = msgspec.json.schema_components(
    BODIES.values(), schema_hook=lambda _: {"description": "any"}, ref_template="{name}"
)

WORDS = (
    *("", "x", "é\0", "🙂", "\n", "Rome", "f", "1", "auto", "none", "required", "low", "json"),
    *("text", "input_text", "output_text", "refusal", "thinking", "image", "image_url", "document"),
    *("tool_use", "tool_result", "function", "custom", "web_search", "message", "reasoning"),
    *("function_call", "function_call_output", "summary_text", "reasoning_text", "json_schema"),
    *("system", "user", "assistant", "flowspec", 'start: "a"', "[ab]{1,3}", "(", '{"a": 1}'),
)
"""What fields of text hold, kinds of parts and grammars among them."""

OBJECTS: tuple[dict[str, Any], ...] = (
    {},
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    {"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "integer"}}},
    {"enum": [1, "a", None]},
)
"""What fields of any value hold: schemas among them."""


def drawn(schema: Mapping[str, Any], levels: int = 6) -> st.SearchStrategy[Any]:
    """Values that a JSON schema of msgspec's allows, few properties at a time."""
    if name := schema.get("$ref"):
        return st.deferred(lambda: drawn(COMPONENTS[name], levels - 1))
    if options := schema.get("anyOf"):
        null = {"type": "null"}
        if levels <= 0 and null in options:
            return st.none()
        return st.one_of(*(drawn(option, levels) for option in options if option != null))
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "object":
            return _object(schema, levels)
        case "array":
            least = max(1, schema.get("minItems", 0))
            return st.lists(drawn(schema["items"], levels - 1), min_size=least, max_size=least + 2)
        case "string":
            return st.sampled_from(WORDS)
        case "integer":
            low, high = schema.get("minimum", -1), schema.get("maximum", 2**53)
            return st.one_of(st.integers(max(low, -1), min(high, 9)), st.sampled_from([low, high]))
        case "number":
            low = schema.get("minimum", schema.get("exclusiveMinimum", -1))
            return st.floats(
                low, schema.get("maximum", 2), exclude_min="exclusiveMinimum" in schema
            )
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case _:
            return st.one_of(st.sampled_from(WORDS), st.integers(0, 9), st.sampled_from(OBJECTS))


def _object(schema: Mapping[str, Any], levels: int) -> st.SearchStrategy[Any]:
    fields = schema.get("properties")
    if fields is None:
        inner = schema.get("additionalProperties")
        if not isinstance(inner, dict):
            return st.sampled_from(OBJECTS)
        return st.dictionaries(st.sampled_from(WORDS), drawn(inner, levels - 1), max_size=2)
    required = schema.get("required", [])
    optional = sorted(fields.keys() - set(required) - {"model"})
    count = min(len(optional), 4) if levels > 0 else 0
    names = (
        st.lists(st.sampled_from(optional), max_size=count, unique=True) if count else st.just([])
    )

    def chosen(some: list[str]) -> st.SearchStrategy[Any]:
        return st.fixed_dictionaries(
            {name: drawn(fields[name], levels - 1) for name in (*required, *some)}
        )

    return names.flatmap(chosen)


@st.composite
def bodies(draw: st.DrawFn, sound: Mapping[str, Any], drawn_body: st.SearchStrategy[Any]) -> bytes:
    """A sound body with more fields, one drawn as a whole, or either with any value in place of
    one of its own."""
    value: dict[str, Any] = draw(drawn_body)
    if draw(st.integers(0, 3)):
        value = {**value, **sound}
    if draw(st.integers(0, 3)) or not (paths := list(places(value))):
        return json.dumps(value).encode()
    return filled(template(value, draw(st.sampled_from(paths))), draw(values))


requests = st.one_of(
    *(
        st.tuples(st.just(path), bodies(SOUND[path], drawn(schema)))
        for path, schema in zip(BODIES, SCHEMAS, strict=True)
    )
)


def check_error(path: str, value: Any) -> None:
    """An error in the form of the path's dialect."""
    error = value["error"]
    if path.startswith("/api/"):
        assert set(value) == {"error"}
        assert isinstance(error, str)
        return
    anthropic = path.startswith("/v1/messages")
    assert set(value) == ({"type", "error"} if anthropic else {"error"})
    assert set(error) == (
        {"type", "message"} if anthropic else {"message", "type", "param", "code"}
    )
    assert error["message"]
    assert error["type"] != "server_error"


def values_of(kind: str, body: bytes) -> Iterator[Any]:
    """The JSON of a whole answer, or of each event of a stream."""
    if kind == "application/json":
        yield json.loads(body)
    elif kind == "application/x-ndjson":
        yield from map(json.loads, body.splitlines())
    else:
        assert kind == "text/event-stream"
        assert body.endswith(b"\n\n")
        for line in body.replace(DONE, b"").splitlines():
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))
            else:
                assert line.startswith((b"event: ", b": ")) or not line


async def check(web: aiohttp.ClientSession, path: str, body: bytes) -> None:
    async with (
        asyncio.timeout(SECONDS),
        web.post(path, data=body, headers={"Content-Type": "application/json"}) as reply,
    ):
        answered = list(values_of(reply.content_type, await reply.read()))
        assert reply.status in (200, 400, 404, 413, 429)
        assert answered
        for value in answered:
            # A Response states that it has none.
            if value.get("error") or reply.status != 200:
                check_error(path, value)


def test_every_route_is_drawn() -> None:
    posts = {
        path
        for dialect in DIALECTS.values()
        for method, path in dialect.routes
        if method not in ("GET", "HEAD")
    }
    assert posts < BODIES.keys()


@pytest.mark.parametrize(
    "facts", [ChatFacts(), ChatFacts("hermes", True, "tags", ("enable_thinking",))]
)
def test_every_body_is_answered(facts: ChatFacts) -> None:
    rules = replace(RULES, context_length=300, chat=facts)
    with asyncio.Runner() as runner:
        toy = runner.run(Toy(rules=rules).__aenter__())
        web = runner.run(_session(toy.url))

        @settings(max_examples=examples(3000, quick=60))
        @given(requests)
        def law(request: tuple[str, bytes]) -> None:
            runner.run(check(web, *request))

        try:
            law()
            runner.run(toy.settled())
            assert toy.service.concurrency.taken == 0
        finally:
            runner.run(web.close())
            runner.run(toy.__aexit__())


async def _session(url: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(url)
