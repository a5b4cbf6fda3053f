"""What every HTTP dialect owes the service: routes of its own, and an answer or an error for any
body."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.constraint.bounds import MAX_LEVELS
from asyncspec.testing.examples import unhurried
from asyncspec_nodes.http.api.answers import ChoiceBuffer, RequestContext
from asyncspec_nodes.http.api.completions import Completion
from asyncspec_nodes.http.api.errors import ApiError
from asyncspec_nodes.http.api.parameters import parse
from asyncspec_nodes.http.dialects import DIALECTS, Dialect
from asyncspec_nodes.http.openapi import description
from asyncspec_nodes.serving.templates import ChatFacts
from asyncspec_protocol.messages import Finished, Output

Body = Mapping[str, Any]

FACTS = (
    ChatFacts(),
    ChatFacts("hermes", True, "tags", ("enable_thinking",)),
    ChatFacts("harmony", True, "", ("reasoning_effort",)),
    ChatFacts("qwen3-coder", True, "open", ("thinking",)),
    ChatFacts("kimi-k2", True, "asked", ("enable_thinking", "thinking")),
    ChatFacts("deepseek", False, "always"),
)
"""Chat templates of models, by what they can do."""

ANSWER = '<tool_call>\n{"name": "f", "arguments": {"city": [1]}}\n</tool_call>'


def check_dialect(
    dialect: Dialect, bodies: Mapping[str, Sequence[Body]], max_examples: int = 100
) -> None:
    """Check a dialect's routes, and its endpoints on its bodies with any JSON value in any field.

    Arguments:
        dialect: it need not be registered.
        bodies: for every endpoint, bodies that are valid with some chat template.
        max_examples: changed bodies to try.

    Raises:
        AssertionError: it breaks a law.
    """
    check_routes(dialect)
    assert set(bodies) == set(dialect.endpoints), "every endpoint needs bodies"
    described: Any = description(dialect.endpoints, "1")
    assert described["paths"].keys() == set(dialect.endpoints)
    for path, examples in bodies.items():
        for body in examples:
            text = json.dumps(body).encode()
            problems = [error_of(dialect.endpoints[path], text, facts) for facts in FACTS]
            assert None in problems, f"{path}: {problems[0]}"
    templates = [
        (dialect.endpoints[path], template(body, place))
        for path, examples in bodies.items()
        for body in examples
        for place in places(body)
    ]
    if templates:
        _check_any_value(templates, max_examples)


def check_routes(dialect: Dialect) -> None:
    """Paths begin with a slash, no other dialect has them, and public ones are among them."""
    routes = own_routes(dialect)
    assert all(path.startswith("/") and method.isupper() for method, path in routes)
    assert len(routes) == len(dialect.endpoints) + len(dialect.routes)
    others = [entry for entry in DIALECTS.values() if entry is not dialect]
    assert all(routes.isdisjoint(own_routes(entry)) for entry in others)
    assert dialect.public <= {path for _, path in dialect.routes}


def own_routes(dialect: Dialect) -> set[tuple[str, str]]:
    """All routes, by method and path."""
    return {*dialect.routes, *(("POST", path) for path in dialect.endpoints)}


def error_of(kind: type[Any], body: bytes, facts: ChatFacts) -> ApiError | None:
    """Why a body asks for nothing. Where it does, what becomes of an answer can be written."""
    try:
        call = parse(body, kind).call(RequestContext(seed=5, id="i", model="m", facts=facts))
    except ApiError as error:
        return error
    write(call)
    return None


def write(call: Completion) -> None:
    """An answer to a call, as it is sent."""
    answers = [ChoiceBuffer() for _ in call.submits]
    call.begin(answers)
    for index, answer in enumerate(answers):
        answer.add(Output(0, (1,), ANSWER))
        answer.add(Finished(0, "stop", "", {"prompt_tokens": 1.0}))
        if call.stream:
            call.write(index, answer)
    if call.stream:
        call.end(answers)
    else:
        msgspec.json.encode(call.body(answers))


def _check_any_value(templates: Sequence[tuple[type[Any], str]], max_examples: int) -> None:
    @unhurried(max_examples)
    @given(st.sampled_from(templates), values, st.sampled_from(FACTS))
    def check(body: tuple[type[Any], str], value: str, facts: ChatFacts) -> None:
        kind, text = body
        check_error(error_of(kind, filled(text, value), facts))

    check()


def check_error(error: ApiError | None) -> None:
    """An error is the client's, and can be written."""
    if error is not None:
        assert error.status == 400
        json.loads(msgspec.json.encode(error.body()))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of keys and indices to every value inside another."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


HERE = "@here@"
"""Stands in a template for the value to come."""


def template(body: Body, place: tuple[Any, ...]) -> str:
    """The body's JSON with ``HERE`` in place of a value."""
    copy: Any = json.loads(json.dumps(body))
    inner = copy
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = HERE
    return json.dumps(copy)


def filled(text: str, value: str) -> bytes:
    """A template's body with some JSON in place of ``HERE``."""
    return text.replace(json.dumps(HERE), value).encode()


def nested(levels: int, begin: str = "[", end: str = "]") -> str:
    """JSON of so many levels."""
    return (begin * levels + end * levels).replace(":}", ":1}")


DEEP = [
    nested(levels, *around)
    for levels in (MAX_LEVELS - 10, MAX_LEVELS, *range(900, 1000, 9), 3000)
    for around in (("[", "]"), ('{"a":', "}"))
]

values = st.one_of(
    st.recursive(
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(-(2**70), 2**70),
            st.floats(allow_nan=False, allow_infinity=False),
            st.text(max_size=5),
            st.sampled_from(["5", "null", "[1]", "{", "auto", "required", "text"]),
        ),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.sampled_from(["$defs", "definitions", "properties", "type", "a", "9" * 4301]),
                inner,
                max_size=3,
            ),
        ),
        max_leaves=5,
    ).map(json.dumps),
    st.sampled_from(DEEP),
    # As text, which some fields read as JSON.
    st.sampled_from(DEEP).map(json.dumps),
)
"""JSON of any value, of few levels or of too many."""
