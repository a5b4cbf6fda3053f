"""Random answers keep to random schemas; the checker tells those that do not."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from asyncspec.constraint.grammar import Grammars
from asyncspec.constraint.text import of_schema
from tools.bench.masks import (
    answer,
    check_schemas,
    conforms,
    mask_seconds,
    random_schema,
    save_model,
    vocabulary,
)


def test_random_answers_keep_to_random_schemas() -> None:
    found = check_schemas(40, seed=1)
    assert found == {"valid": 40, "wrong": 0, "endless": 0, "refused": 0}


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        ({"id": 1}, {"type": "object", "properties": {}, "required": []}),
        ({}, {"type": "object", "properties": {"id": {"type": "null"}}, "required": ["id"]}),
        ([1], {"type": "array", "items": {"type": "null"}, "minItems": 0, "maxItems": 2}),
        (True, {"type": "integer", "minimum": 0, "maximum": 2}),
        (1, {"enum": [True]}),
        ("ab1", {"type": "string", "pattern": "^[a-z]{2,5}$"}),
    ],
)
def test_the_checker_refuses(value: object, schema: dict[str, object]) -> None:
    assert not conforms(value, schema)


@pytest.mark.torch
def test_the_tokenizer_of_the_random_model_has_the_vocabulary(tmp_path: Path) -> None:
    from asyncspec.plugins.hf.checkpoint.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(save_model(600, tmp_path, width=64, layers=1))
    words = vocabulary(600)
    assert [tokenizer.spell(i) for i in range(599)] == list(words.spelled[:-1])
    assert tokenizer.is_special(599)


def test_answers_differ_and_times_are_measured() -> None:
    words = vocabulary(400)
    grammar = of_schema(random_schema(Random(3)) | {"type": "object", "properties": {}})
    assert Grammars(lambda: words).problem(grammar) is None
    matcher = Grammars(lambda: words).matcher(of_schema({"type": "string", "maxLength": 9}))
    assert answer(matcher, words, Random(1)) is not None
    assert set(mask_seconds(400, 20)) >= {"vocabulary", "compile", "mask", "mask_p99"}
