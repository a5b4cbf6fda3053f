"""What each family's template writes of a past turn is read back as that turn."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import pairwise

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec_nodes.chat.answers import answer_parser
from asyncspec_nodes.chat.calls import Call, Tool
from asyncspec_nodes.chat.stepwise import Part, WholeCalls
from asyncspec_nodes.serving.syntax.registry import SYNTAXES
from asyncspec_nodes.serving.templates import ChatFacts, answer_markers, facts_of
from chat.families import FAMILIES, Family
from effort import examples

TOOLS = (
    Tool(
        "get_weather",
        "",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "now": {"type": "boolean"},
                "more": {"type": "object"},
                "list": {"type": "array"},
            },
        },
    ),
    Tool("get", "", {"type": "object", "properties": {"city": {"type": "string"}}}),
    Tool("ping"),
)

# What syntaxes are made of, and any text.
signs = st.sampled_from(
    ['"', "'", "{", "}", "[", "]", "(", ")", ",", ":", "=", "|>", "\\", "\n", "x"]
)
values = st.text(max_size=12) | st.lists(signs, max_size=8).map("".join)
inner = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | values,
    lambda more: (
        st.lists(more, max_size=2) | st.dictionaries(st.text(max_size=3), more, max_size=2)
    ),
    max_leaves=4,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "city": values,
        "days": st.integers(-(10**9), 10**9),
        "now": st.booleans(),
        "more": st.dictionaries(st.text(max_size=4), inner, max_size=2),
        "list": st.lists(inner, max_size=3),
    },
)
calls = st.lists(
    st.one_of(
        st.tuples(st.just("get_weather"), arguments),
        st.tuples(st.just("get"), st.fixed_dictionaries({"city": values})),
        st.tuples(st.just("ping"), st.just({})),
    ),
    max_size=3,
)
words = st.lists(st.sampled_from(["so", "the", "rain", "is <b>", "a [1]", "{x}", "\n", "é"]))
texts = words.map(" ".join).map(str.strip)


def rendered(family: Family, reasoning: str, content: str, made: object) -> str:
    environment = jinja2.Environment()
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    listed = [{"name": name, "arguments": given} for name, given in made]  # type: ignore[attr-defined]
    template = environment.from_string(family.template)
    return template.render(reasoning=reasoning, content=content, calls=listed)


def taken(facts: ChatFacts, text: str, cuts: list[int]) -> tuple[str, str, list[Call]]:
    """Reasoning, content and calls of an answer that comes in pieces."""
    parser = answer_parser(facts, TOOLS, parallel=True, opened=False)
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    parts = [part for a, b in pairwise(edges) for part in parser.feed(text[a:b])]
    joined = WholeCalls().joined([*parts, *parser.finish()])
    texts = {
        kind: "".join(p.text for p in joined if isinstance(p, Part) and p.kind == kind)
        for kind in ("reasoning", "content")
    }
    found = [part for part in joined if isinstance(part, Call)]
    return texts["reasoning"], texts["content"], found


def keys(value: object) -> Iterator[str]:
    """Of all objects within."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    for inside in value if isinstance(value, list | tuple) else ():
        yield from keys(inside)


def test_every_syntax_has_a_template_here() -> None:
    assert {family.syntax for family in FAMILIES.values()} == SYNTAXES.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_template_says_which_family_it_is(name: str) -> None:
    family = FAMILIES[name]
    facts = facts_of(family.template)
    assert facts.syntax == family.syntax
    # harmony's channels are none of the tags.
    tagged = "reasoning" in family.template and family.syntax != "harmony"
    assert facts.reasoning == ("tags" if tagged else "")
    markers = answer_markers(family.template)
    for begin, end in SYNTAXES[family.syntax].around:
        assert begin not in family.template or {begin, end} - {""} <= markers | {end}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=examples(100, quick=25))
@given(texts, texts, calls, st.lists(st.integers(0, 500), max_size=6), st.integers())
def test_a_past_turn_is_read_back(
    name: str, reasoning: str, content: str, made: list[tuple[str, dict[str, object]]],
    cuts: list[int], seed: int,
) -> None:  # fmt: skip
    family = FAMILIES[name]
    written = json.dumps(made, ensure_ascii=False)
    if any(mark in written for mark in family.marks) or (family.alone and made and content):
        return
    if family.bare_keys and not all(map(str.isidentifier, keys(made))):
        return
    if "reasoning" not in family.template:
        reasoning = ""
    if not made and content[:1] in ("{", "["):
        return  # it may be a call as JSON; see the tests of those
    said = rendered(family, reasoning, content, made)
    facts = facts_of(family.template)
    thought, text, found = taken(facts, said, cuts)
    assert thought.strip() == reasoning
    assert text.strip() == content
    assert [(call.name, json.loads(call.arguments)) for call in found] == made
    everywhere = random.Random(seed).sample(range(len(said) + 1), min(len(said), 40))
    assert taken(facts, said, everywhere) == (thought, text, found)
