"""Schemas lose what grammars do not hold answers to, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from asyncspec.constraint import text
from asyncspec.constraint.annotations import FORMATS, enforced

FORMS = ["password", "uuid4", "binary", "byte", "int32", "iri", "regex", "json-pointer"]


@pytest.mark.parametrize("form", [*FORMS, *sorted(FORMATS)])
def test_any_format_compiles(form: str) -> None:
    schema = {"type": "string", "format": form}
    assert LLMatcher.validate_grammar(text.of_schema(schema), None) == ""
    assert (enforced(schema) == schema) == (form in FORMATS)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
        {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        {"$defs": {"a": {"type": "string", "format": "path"}}, "$ref": "#/$defs/a"},
        {"properties": {"format": {"format": "x", "type": "string"}}, "type": "object"},
    ],
)
def test_schemas_of_real_programs_compile(schema: dict[str, Any]) -> None:
    assert LLMatcher.validate_grammar(text.of_schema(schema), None) == ""


@pytest.mark.parametrize("schema", [{"not": {}}, {"dependentRequired": {"a": ["b"]}}])
def test_what_would_change_the_meaning_is_not_left_out(schema: dict[str, Any]) -> None:
    assert LLMatcher.validate_grammar(text.of_schema(schema), None)


def test_what_is_left_out_is_told() -> None:
    names: list[str] = []
    schema = {"items": {"format": "path"}, "uniqueItems": True, "title": "t"}
    assert enforced(schema, names.append) == {"items": {}, "title": "t"}
    assert names == ["format 'path'", "uniqueItems"]


def test_one_of_is_told_where_more_may_match() -> None:
    names: list[str] = []
    number: dict[str, Any] = {"oneOf": [{"type": "number"}]}
    schema = {"items": number, "oneOf": [{"type": "number"}, {"type": "integer"}]}
    assert enforced(schema, names.append) == schema
    assert names == ["oneOf: as anyOf"]


def test_properties_and_values_of_those_names_stay() -> None:
    schema = {
        "properties": {"uniqueItems": {"type": "boolean"}, "format": {"type": "string"}},
        "const": {"format": "x", "uniqueItems": True},
        "enum": [{"format": "x"}],
    }
    assert enforced(schema) == schema


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["format", "items", "properties", "anyOf", "x"]), inner)
    ),
    max_leaves=12,
)


@given(json)
def test_any_value_is_taken_and_twice_is_once(schema: Any) -> None:
    found = enforced(schema)
    assert enforced(found) == found
