"""``asyncspec models``, and models by their short names."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec_nodes.cli import main as cli
from asyncspec_nodes.cluster.automatic import PAIRS
from asyncspec_nodes.cluster.named_models import NAMED_MODELS, NamedModel, named, target_of
from asyncspec_nodes.plugins.preflight.models_command import NODE_BYTES, fits, memory_of
from asyncspec_protocol.messages import Status

SIZES = st.floats(0, 1e12)

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
QWEN3_MOE = {**QWEN3, "model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128}
LLAMA3 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}


def shape(layers: int, width: int, inner: int, heads: int, **more: object) -> dict[str, object]:
    sizes = {"hidden_size": width, "intermediate_size": inner, "moe_intermediate_size": inner}
    return {"num_hidden_layers": layers, "num_attention_heads": heads, **sizes, **more}


TIED = {"tie_word_embeddings": True}
SMOLLM2 = {**LLAMA3, **TIED, "vocab_size": 49152}
GPT_OSS = {"model_type": "gpt_oss", "num_hidden_layers": 36, "num_local_experts": 128}
CONFIGURATIONS: dict[str, dict[str, object]] = {
    "smollm2": {**SMOLLM2, **shape(30, 576, 1536, 9, num_key_value_heads=3)},
    "qwen3-0.6b": {**QWEN3, **shape(28, 1024, 3072, 16, **TIED)},
    "qwen3-1.7b": {**QWEN3, **shape(28, 2048, 6144, 16, **TIED)},
    "qwen3-4b": {**QWEN3, **shape(36, 2560, 9728, 32, **TIED)},
    "qwen3-8b": {**QWEN3, **shape(36, 4096, 12288, 32)},
    "qwen3-14b": {**QWEN3, **shape(40, 5120, 17408, 40)},
    "qwen3-32b": {**QWEN3, **shape(64, 5120, 25600, 64)},
    "qwen3-30b-a3b": {**QWEN3_MOE, **shape(48, 2048, 768, 32)},
    "qwen3-235b-a22b": {**QWEN3_MOE, **shape(94, 4096, 1536, 64)},
    "llama3.1-8b": {**LLAMA3, **shape(32, 4096, 14336, 32)},
    "llama3.3-70b": {**LLAMA3, **shape(80, 8192, 28672, 64)},
    "gpt-oss-20b": {**GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": GPT_OSS,
}
"""What the models' published ``config.json`` say of their sizes."""


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [line["name"] for line in listed] == [model.name for model in NAMED_MODELS]
    assert cli.main(["models", "--machines", "9"]) == 0
    assert "qwen3-32b" in capsys.readouterr().out


def test_names_are_ids_and_others_stay_what_they_are() -> None:
    assert target_of("Qwen3-8B") == "Qwen/Qwen3-8B"
    assert target_of("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    model = named("qwen3-8b")
    assert model is not None
    assert model.drafts == PAIRS[0].sources


@pytest.mark.torch
@pytest.mark.slow
def test_weights_and_layers_are_those_of_the_published_configurations() -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    assert {*CONFIGURATIONS} == {model.name for model in NAMED_MODELS}
    for model in NAMED_MODELS:
        config = AutoConfig.for_model(**CONFIGURATIONS[model.name])
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config)
        built.tie_weights()
        weights = sum(parameter.numel() for parameter in built.parameters())
        assert (model.weights, model.layers) == (weights, config.num_hidden_layers), model.name


@given(st.lists(SIZES, min_size=1, max_size=5), st.floats(1e6, 1e12))
def test_more_memory_never_fits_less(machines: list[float], weights: float) -> None:
    ranks = ("no", "in int4 on", "in int4", "yes")
    model = NamedModel("x", "x", int(weights), 1)

    def rank(free: list[float]) -> int:
        text = fits(model, free)
        return max(i for i, start in enumerate(ranks) if text.startswith(start))

    assert rank(machines) <= rank([free + 1e9 for free in machines])
    assert fits(model, [2 * weights + NODE_BYTES + 1e3]) == "yes"


def test_a_clusters_memory_is_what_is_free_and_what_it_holds() -> None:
    def status(rank: int, host: str, free: int, held: int) -> Status:
        return Status(
            0, rank, "verify", (0, 1), 1.0, 0.0, held, 0, 0, 0, host=host, free_bytes=free
        )

    nodes = [status(1, "a", 5, 1), status(2, "a", 5, 2), status(3, "b", 7, 4)]
    assert memory_of(nodes) == [8.0, 11.0]
