"""Sampling settings that a target's files recommend: what is taken over, and what wins."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from asyncspec.core.errors import CheckpointError
from asyncspec.core.sampling import Defaults, Sampling
from asyncspec_nodes.serving.requests import (
    Refusal,
    ServingConfig,
    describe_defaults,
    prepare,
    read_defaults,
    tokenize,
)
from asyncspec_protocol.messages import Submit
from nodes.test_service import ASK, RULES, Letters

NAMES = Defaults.__struct_fields__
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 5),
    "top_k": st.integers(0, 100),
    "top_p": st.floats(0, 1, exclude_min=True),
    "min_p": st.floats(0, 1, exclude_max=True),
    "repetition_penalty": st.floats(0.5, 2),
}
values = st.fixed_dictionaries({}, optional=VALUES)
unset = st.sets(st.sampled_from([*NAMES, "frequency_penalty", "prompt"])).map(tuple)


def sampling(rules: ServingConfig, submit: Submit) -> Sampling:
    request = prepare(submit, 0, rules, partial(tokenize, Letters()))
    assert not isinstance(request, Refusal)
    return request.sampling


@given(values, values, unset)
def test_a_requests_own_settings_win(
    recommended: dict[str, Any], said: dict[str, Any], left: tuple[str, ...]
) -> None:
    rules = replace(RULES, defaults=Defaults(**recommended))
    submit = replace(ASK, **said, unset=left)
    found = asdict(sampling(rules, submit))
    for name, value in found.items():
        taken = name in left and name in recommended
        assert value == (recommended[name] if taken else getattr(submit, name))


def target(folder: Path, text: str | None) -> Path:
    if text is not None:
        (folder / "generation_config.json").write_text(text)
    return folder


@given(values, st.sampled_from([True, None]))
def test_the_file_is_taken_over(
    tmp_path_factory: pytest.TempPathFactory, recommended: dict[str, Any], sample: bool | None
) -> None:
    said = {"eos_token_id": 3, "max_length": 20, "do_sample": sample, **recommended}
    folder = target(tmp_path_factory.mktemp("t"), json.dumps(said))
    assert read_defaults(folder, "auto") == Defaults(**recommended)
    assert read_defaults(folder, "none") == Defaults()


def test_without_sampling_it_is_greedy(tmp_path: Path) -> None:
    """What such a file says of temperatures is for others."""
    said = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
    folder = target(tmp_path, json.dumps(said))
    assert read_defaults(folder, "auto") == Defaults(temperature=0.0, repetition_penalty=1.1)


def test_a_top_k_of_minus_one_is_no_limit(tmp_path: Path) -> None:
    """As vLLM spells it."""
    found = read_defaults(target(tmp_path, '{"top_k": -1, "top_p": 0.9}'), "auto")
    assert found == Defaults(top_k=0, top_p=0.9)


@pytest.mark.parametrize("text", [None, "{}", '{"temperature": null, "top_k": null}'])
def test_an_empty_file(tmp_path: Path, text: str | None) -> None:
    found = read_defaults(target(tmp_path, text), "auto")
    assert found == Defaults()
    assert describe_defaults(found.given) == ""


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -1}, "temperature is -1; it must be 0 (greedy) or more"),
        ({"top_p": 0}, "top-p is 0; it must be above 0 and at most 1"),
        ({"top_k": -2}, "top-k is -2"),
        ({"top_k": 2**70}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"min_p": 1}, "min-p is 1"),
        ({"repetition_penalty": [1]}, "repetition_penalty"),
    ],
)
def test_invalid_defaults_are_reported(tmp_path: Path, said: dict[str, Any], says: str) -> None:
    folder = target(tmp_path, json.dumps(said))
    with pytest.raises(CheckpointError) as caught:
        read_defaults(folder, "auto")
    text = str(caught.value)
    assert says in text
    assert str(folder / "generation_config.json") in text
    assert "none" in text
    assert "\n" not in text
    assert read_defaults(folder, "none") == Defaults()


def test_invalid_defaults_of_a_gguf_file_are_in_its_metadata(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_float32("general.sampling.temp", -1.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    says = rf"^{re.escape(str(path))}, metadata general\.sampling: temperature is -1"
    with pytest.raises(CheckpointError, match=says):
        read_defaults(path, "auto")


def test_a_broken_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be read"):
        read_defaults(target(tmp_path, "{"), "auto")


def test_defaults_are_described() -> None:
    assert describe_defaults({"temperature": 0.6, "top_k": 20}) == "temperature 0.6, top_k 20"
