"""How long a text a model is for: as transformers understands its configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.backend.reference import decode
from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.checkpoint.model_config import context_length, read_config
from backend.probe import cut
from backend.tiny import generated

pytestmark = pytest.mark.torch

lengths = st.integers(16, 1 << 20)
factors = st.one_of(st.integers(1, 64), st.floats(1, 64))
scalings = st.fixed_dictionaries(
    {"factor": factors},
    optional={
        "original_max_position_embeddings": lengths,
        "low_freq_factor": st.just(1.0),
        "high_freq_factor": st.just(4.0),
        "beta_fast": st.just(32),
    },
)
KINDS = ("default", "linear", "llama3", "yarn")


def directory(factory: pytest.TempPathFactory, config: dict[str, Any]) -> Path:
    folder = factory.mktemp("c")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@given(
    lengths,
    scalings,
    st.sampled_from(KINDS),
    st.sampled_from([{"rope_type": True}, {"type": True}, {"rope_type": True, "type": True}]),
    st.sampled_from(["rope_scaling", "rope_parameters"]),
    st.none() | lengths,
)
def test_yarn_scaling_gives_the_context_length(
    tmp_path_factory: pytest.TempPathFactory,
    most: int,
    scaling: dict[str, Any],
    kind: str,
    names: dict[str, bool],
    key: str,
    outside: int | None,
) -> None:
    config: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    config |= {"max_position_embeddings": most, key: {**scaling, **dict.fromkeys(names, kind)}}
    if outside is not None:
        config["original_max_position_embeddings"] = outside
    folder = directory(tmp_path_factory, config)
    found = context_length(read_config(folder), folder)
    if kind != "yarn":
        assert found == most
        return
    theirs = transformers.AutoConfig.from_pretrained(str(folder))
    theirs.standardize_rope_params()  # as the model does it once more
    rope = theirs.rope_parameters
    assert rope["rope_type"] == "yarn"
    assert found == int(rope["original_max_position_embeddings"] * rope["factor"])


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        # What Qwen2.5 and Qwen3 recommend for long texts; a file that counts the factor in.
        ({"max_position_embeddings": 32768, "rope_scaling": {**YARN, "type": "yarn"}}, 131072),
        ({"max_position_embeddings": 40960, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 131072, "rope_parameters": YARN}, 131072),
        # The factor is then what makes the longest of the original.
        ({"max_position_embeddings": 65536, "rope_scaling": {**YARN, "factor": None}}, 65536),
        ({"max_position_embeddings": 65536, "rope_scaling": None}, 65536),
        ({"max_position_embeddings": 65536, "rope_scaling": {}, "rope_parameters": YARN}, 131072),
        # Gemma 3 counts it in, and has one set for each kind of layer.
        ({"architectures": ["Gemma3ForCausalLM"], "rope_scaling": YARN}, 4096),
        (
            {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"full_attention": YARN}},
            4096,
        ),
    ],
)
def test_published(tmp_path: Path, config: dict[str, Any], length: int) -> None:
    usual = {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 4096}
    assert context_length(usual | config, tmp_path) == length


@pytest.mark.parametrize(
    "wrong",
    [{"factor": "4"}, {"factor": 0}, {"factor": True}, {"original_max_position_embeddings": -1}],
)
def test_invalid_yarn_settings_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    config = {"max_position_embeddings": 4096, "rope_scaling": YARN | wrong}
    with pytest.raises(CheckpointError, match=f"needs a positive number as {next(iter(wrong))}"):
        context_length(config, tmp_path)


def test_tokens_behind_the_original_length_are_those_of_generate(tiny: Callable[..., Path]) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0}
    path = tiny("llama", max_position_embeddings=32, rope_parameters=rope)
    checkpoint = open_checkpoint(path)
    assert checkpoint.info.context_length == 256
    random = Random(5)
    prompt = [random.randrange(3, 150) for _ in range(40)]
    assert decode(cut(checkpoint, 2), prompt, 24) == generated(path, prompt, 24)
