"""What msgspec says of a user's input becomes one sentence in the user's words."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta, Struct

from asyncspec.core.errors import InputProblem


class Inner(Struct, forbid_unknown_fields=True):
    port: Annotated[int, Meta(le=65535)]


class Outer(Struct):
    node: list[Inner]

    def __post_init__(self) -> None:
        if not self.node:
            raise ValueError("Give at least one node")


@pytest.mark.parametrize(
    ("given", "problem", "sentence"),
    [
        ({}, ("missing", "node"), "missing key: node"),
        ({"node": [{}]}, ("missing", "node[0].port"), "missing key: node[0].port"),
        ({"node": [{"post": 1}]}, ("unknown", "node[0].post"), "unknown key: node[0].post"),
        (
            {"node": [{"port": 70000}]},
            ("invalid", "node[0].port"),
            "node[0].port: expected int <= 65535",
        ),
        ({"node": 1}, ("invalid", "node"), "node: expected array, got int"),
        ({"node": []}, ("invalid", ""), "give at least one node"),
        (3, ("invalid", ""), "expected object, got int"),
    ],
)
def test_a_sentence_names_the_field(given: Any, problem: tuple[str, str], sentence: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(given, Outer)
    found = InputProblem.of(caught.value)
    assert (found.kind, found.where) == problem
    assert found.sentence("key") == sentence
