"""Whatever strangers send as a grammar, up to a megabyte: compiled, or refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncspec.constraint import text
from asyncspec.constraint.grammar import Grammars
from constraint.test_bounds import vocabulary
from effort import examples

BOUNDED = Grammars(vocabulary, bounded=True)
MAX_FACTOR = 1 << 20

PIECES = (
    *(
        "start: ",
        "root ::= ",
        "%json ",
        "%regex ",
        "%llguidance ",
        "%import ",
        "r1",
        "r2",
        ": ",
        "::= ",
    ),
    *(
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        "{1,9}",
        "{9999}",
        "*",
        "+",
        "?",
        "|",
        "/",
        '"',
        "\\",
        "\n",
        " ",
    ),
    *(
        "a",
        "[^a]",
        ".",
        "\\d",
        "\\p{L}",
        "(?i)",
        "(?=a)",
        "~",
        "&",
        "#",
        "//",
        "<eos>",
        "é",
        "\x00",
        "\ud800",
    ),
    *(
        '{"type": ',
        '"string"',
        '"object"',
        '"$ref": "#"',
        '"$defs": {',
        '"pattern": "(a+)+$"',
        "1e999",
    ),
)


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Pieces of languages, some of them repeated up to a megabyte in all."""
    pieces = draw(st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=12))
    if pieces and draw(st.booleans()):
        place = draw(st.integers(0, len(pieces) - 1))
        room = MAX_FACTOR // max(1, len(pieces[place].encode(errors="replace")))
        pieces[place] *= draw(
            st.sampled_from([2, 99, 1000, 30_000, room]).map(lambda n: min(n, room))
        )
    return "".join(pieces)


names = st.sampled_from(["a", "b", "x y", "é", ""])
numbers = st.sampled_from([-1, 0, 1, 3, 99, 10**6, 2**63, 0.5, 1e308])
references = st.sampled_from(["#", "#/$defs/a", "#/$defs/b", "#/properties/a", "http://x/y", "#/%"])
patterns = st.sampled_from(
    ["^a+$", "(a|b)*c{2,90}", "(?=a)", "[", "(" * 200, "a{9999}", "\\p{L}{99}"]
)
leaves = st.one_of(
    st.booleans(),
    st.sampled_from(["string", "integer", "number", "null", "object", "array", "?"]).map(
        lambda kind: {"type": kind}
    ),
    references.map(lambda target: {"$ref": target}),
    patterns.map(lambda pattern: {"type": "string", "pattern": pattern}),
    st.tuples(st.sampled_from(["minLength", "maxLength", "multipleOf", "minimum"]), numbers).map(
        lambda pair: {"type": "string" if "Length" in pair[0] else "number", pair[0]: pair[1]}
    ),
    st.lists(st.one_of(numbers, names, st.none()), max_size=3).map(lambda values: {"enum": values}),
    st.sampled_from(["date-time", "uuid", "ipv6", "?"]).map(
        lambda f: {"type": "string", "format": f}
    ),
)


def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas of such ones."""
    several, named = st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)
    return st.one_of(
        st.tuples(st.sampled_from(["allOf", "anyOf", "oneOf", "prefixItems"]), several).map(
            lambda pair: {pair[0]: pair[1]}
        ),
        st.tuples(st.sampled_from(["items", "not", "additionalProperties", "contains"]), inner).map(
            lambda pair: {pair[0]: pair[1]}
        ),
        named.map(lambda found: {"type": "object", "properties": found, "required": [*found]}),
        st.tuples(inner, named).map(lambda pair: {"allOf": [pair[0]], "$defs": pair[1]}),
        st.tuples(inner, numbers, numbers).map(
            lambda parts: {
                "type": "array",
                "items": parts[0],
                "minItems": parts[1],
                "maxItems": parts[2],
            }
        ),
    )


schemas = st.recursive(leaves, larger, max_leaves=12)


def multiplied(schema: Any, how: str, times: int) -> Any:
    """A schema in itself, or beside itself, so often as a megabyte holds."""
    times = min(times, MAX_FACTOR // len(json.dumps(schema)))
    if how == "beside":
        return {"anyOf": [schema] * times}
    if how == "named":
        return {"type": "object", "properties": {f"p{n}": schema for n in range(times)}}
    for _ in range(min(times, 3000)):
        schema = {"type": "array", "items": schema} if how == "within" else {"anyOf": [schema]}
    return schema


def takes_tokens(grammar: str) -> None:
    """Its masks are computed where other users' are."""
    matcher = BOUNDED.matcher(grammar)
    for _ in range(3):
        tokens = matcher.allowed(())
        if tokens is None or not matcher.commit([int(tokens[len(tokens) // 2])]):
            return


def is_answered(make: Callable[[], str]) -> None:
    """It is a grammar, or there is one line that says why it is none; the worker goes on."""
    try:
        grammar = make()
    except ValueError as error:
        problem: str | None = str(error)
    else:
        problem = BOUNDED.problem(grammar)
        if problem is None:
            takes_tokens(grammar)
    assert problem is None or (problem.strip() and "\n" not in problem and len(problem) < 2000), (
        problem
    )
    assert "again and again" not in (problem or "")


how_hard = settings(max_examples=examples(1000, quick=25), deadline=None)
kinds = st.sampled_from([text.of_grammar, text.of_regex, lambda source: source])


@how_hard
@given(texts(), kinds)
def test_of_any_text(source: str, kind: Callable[[str], str]) -> None:
    is_answered(lambda: kind(source))


@how_hard
@given(
    schemas,
    st.sampled_from(["beside", "named", "within", "any"]),
    st.sampled_from([0, 2, 99, 40_000]),
)
@example({"type": "string"}, "named", 40_000)
def test_of_any_schema(schema: Any, how: str, times: int) -> None:
    is_answered(lambda: text.of_schema(multiplied(schema, how, times) if times else schema))


@pytest.fixture(autouse=True, scope="module")
def _closed() -> Any:
    yield
    BOUNDED.close()
