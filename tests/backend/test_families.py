"""Every family we claim: the same tokens as transformers' own generate, however it is cut."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path
from random import Random

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from asyncspec.backend.base import Quantize, StageOptions
from asyncspec.backend.reference import decode
from asyncspec.core.errors import CheckpointError, UserError
from asyncspec.placement.model import Constraints, Device, Network
from asyncspec.placement.rate import throughput_rate
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.checkpoint.files.headers import list_tensors
from asyncspec.plugins.hf.checkpoint.model_config import SUPPORTED
from asyncspec.plugins.hf.model.footprint import footprint
from asyncspec.plugins.hf.model.weights import sub_config
from asyncspec_nodes.cluster.config import LimitsTable
from asyncspec_nodes.cluster.placement import best_placement, target_cost
from backend.probe import cut, same_bits
from backend.tiny import ALTERNATING, FAMILIES, LATENT, LAYERS, PLAIN, VOCAB, YARN_ROPE, generated
from effort import NIGHTLY, nightly

pytestmark = pytest.mark.torch

NEW = 32 if NIGHTLY else 16
TIED = ("llama-tied", "gemma", "gemma2", "gemma3", "gemma4")
"""Their embedding and head are one matrix: a stage that has both differs from two that have one."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_as_generate(family: str, tiny: Callable[..., Path]) -> None:
    path = tiny(family)
    random = Random(family)
    prompt = [random.randrange(3, 150) for _ in range(70)]
    want = generated(path, prompt, NEW)
    assert len(set(want)) > NEW // 8, "one token over and over would prove nothing"
    checkpoint = open_checkpoint(path)
    for stages in (1, 2, 3, LAYERS) if NIGHTLY else (1, LAYERS) if family in TIED else (LAYERS,):
        assert decode(cut(checkpoint, stages), prompt, NEW) == want
    assert decode(cut(checkpoint, 2, mode="fast"), prompt, NEW) == want


DTYPES = ("float32", "bfloat16")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "dtype"), [*(product(FAMILIES, DTYPES) if NIGHTLY else zip(FAMILIES, cycle(DTYPES)))]
)
def test_tree_has_the_bits_of_the_sequence(
    family: str, dtype: str, tiny: Callable[..., Path]
) -> None:
    same_bits(cut(open_checkpoint(tiny(family)), 2, dtype=dtype), family + dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "quantize"),
    [
        case if NIGHTLY or case[1] == "none" or case[0] == "mixtral" else nightly(*case)
        for case in product([f for f in FAMILIES if "mixtral" in f or "moe" in f], ("none", "int8"))
    ],
)
def test_experts_may_be_stored_in_one_tensor_a_layer(
    family: str, quantize: Quantize, tiny: Callable[..., Path]
) -> None:
    one, stacked = tiny(family), tiny(family, save_original_format=False)
    names = open_checkpoint(stacked).tensors
    assert any(".experts." in name for name in names)
    assert list_tensors(stacked).keys() != list_tensors(one).keys()
    random = Random(family)
    prompt = [random.randrange(3, 150) for _ in range(40)]
    for stages in (1, 3) if NIGHTLY else (3,):
        said = [
            decode(cut(open_checkpoint(path), stages, quantize=quantize), prompt, NEW)
            for path in (one, stacked)
        ]
        assert said[0] == said[1]
    if quantize == "none":
        assert said[0] == generated(stacked, prompt, NEW)


@pytest.mark.nightly
@pytest.mark.parametrize("family", PLAIN)
def test_same_tokens_as_generate_cut_and_as_a_tree(family: str, tiny: Callable[..., Path]) -> None:
    path = tiny(family)
    random = Random(family)
    prompt = [random.randrange(3, 150) for _ in range(40)]
    stages = cut(open_checkpoint(path), 2)
    assert decode(stages, prompt, NEW // 2) == generated(path, prompt, NEW // 2)
    same_bits(stages, family)


def test_queries_that_grow_beyond_the_original_length(tiny: Callable[..., Path]) -> None:
    """Ministral 3 multiplies them by a number that depends on the position."""
    path = tiny("ministral3", rope_parameters=YARN_ROPE | {"llama_4_scaling_beta": 0.5})
    random = Random("ministral3")
    prompt = [random.randrange(3, 150) for _ in range(150)]
    stages = cut(open_checkpoint(path), 2)
    assert decode(stages, prompt, NEW // 2) == generated(path, prompt, NEW // 2)
    same_bits(stages, "ministral3")


def test_a_window_that_no_mask_has_is_none(tiny: Callable[..., Path]) -> None:
    """OLMoE hands one on to attention functions of other kinds."""
    random = Random("olmoe")
    prompt = [random.randrange(3, 150) for _ in range(40)]
    with_key, without = (
        decode(cut(open_checkpoint(path), 2), prompt, NEW // 2)
        for path in (tiny("olmoe", sliding_window=16), tiny("olmoe"))
    )
    assert with_key == without


def test_a_window_of_no_tokens_is_refused(tiny: Callable[..., Path]) -> None:
    """Layers with a window, although the model is told to use none."""
    path = tiny("qwen2-moe", layer_types=ALTERNATING)
    with pytest.raises(CheckpointError, match="a sliding window of 0 tokens"):
        cut(open_checkpoint(path), 1)


def test_layers_that_need_tokens_or_each_other_run_in_one_stage(tiny: Callable[..., Path]) -> None:
    """Gemma 4 E2B and E4B."""
    each = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB}
    path = tiny("gemma4", num_kv_shared_layers=2, **each)
    checkpoint, prompt = open_checkpoint(path), [5, 17, 99, 3, 64] * 8
    one = cut(checkpoint, 1)
    assert decode(one, prompt, NEW // 2) == generated(path, prompt, NEW // 2)
    same_bits(one, "gemma4")
    for refused in (
        lambda: cut(checkpoint, 2),
        lambda: footprint(path, checkpoint.info, (0, 2), "auto", "exact"),
    ):
        with pytest.raises(CheckpointError, match=r"cannot be cut: .*--stages 1"):
            refused()
    said = footprint(path, checkpoint.info, (0, LAYERS), "auto", "exact")
    assert said.slot == one[0].shard.cache_shape("exact").slot_bytes()
    target = target_cost(str(path), StageOptions(), 64)
    assert target.memory((0, LAYERS)) >= said.weights + 64 * said.slot
    machines = [Device(name, 2 * target.memory((0, LAYERS)), 1e9) for name in "ab"]
    how = (target, machines, Network(), throughput_rate(1))
    assert [stage.layers for stage in best_placement(*how).stages] == [(0, LAYERS)]
    with pytest.raises(UserError, match=r"cannot be cut into 2 stages: .*--stages 1"):
        best_placement(*how, Constraints(2))


def test_latent_attention_keeps_latents(tiny: Callable[..., Path]) -> None:
    """More heads than masks are repeated for."""
    heads = {"num_attention_heads": 20, "num_key_value_heads": 20, "num_hidden_layers": 3}
    path = tiny("youtu", **heads)
    checkpoint, prompt = open_checkpoint(path), [5, 17, 99, 3, 64] * 8
    want = generated(path, prompt, NEW // 2)
    fast, exact = cut(checkpoint, 2, mode="fast"), cut(checkpoint, 2)
    assert decode(fast, prompt, NEW // 2) == decode(exact, prompt, NEW // 2) == want
    same_bits(exact, "youtu")
    latent, rotated = LATENT["kv_lora_rank"], LATENT["qk_rope_head_dim"]
    assert fast[0].cache_bytes(1) == (2 * latent + rotated) * 4
    for mode, stage in (("fast", fast[1]), ("exact", exact[1])):
        said = footprint(path, checkpoint.info, (1, 3), "auto", mode)
        assert (said.slot, said.weights) == (stage.cache_bytes(1), stage.shard.weight_bytes)


@pytest.mark.parametrize(
    ("family", "wrapper", "model_type", "prefix"),
    [
        ("qwen3.5", "Qwen3_5ForConditionalGeneration", "qwen3_5", "model.language_model."),
        ("llama4", "Llama4ForConditionalGeneration", "llama4", "language_model.model."),
        ("deepseek-v3", "KimiK25ForConditionalGeneration", "kimi_k25", "language_model.model."),
    ],
)
def test_language_model_of_a_multimodal_checkpoint(
    family: str,
    wrapper: str,
    model_type: str,
    prefix: str,
    tiny: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """As they are published: configuration and tensors one level deeper."""
    path = tiny(family)
    text = json.loads((path / "config.json").read_text())
    outer = {
        "architectures": [wrapper],
        "model_type": model_type,
        "dtype": text.pop("dtype"),
        "tie_word_embeddings": text.pop("tie_word_embeddings"),
        "text_config": text,
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(path / "model.safetensors")
    head = "language_model.lm_head." if prefix.startswith("language") else "lm_head."
    deeper = {n.replace("model.", prefix).replace("lm_head.", head): x for n, x in tensors.items()}
    save_file(deeper | {"model.visual.norm.weight": torch.ones(8)}, tmp_path / "model.safetensors")
    stages = cut(open_checkpoint(tmp_path), 2)
    prompt = [5, 17, 99, 3, 64]
    assert decode(stages, prompt, 8) == generated(path, prompt, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3.5-moe", {"hidden_size": 72}),
        ("qwen3.5", {"head_dim": 24, "num_attention_heads": 3, "num_key_value_heads": 3}),
    ],
)
def test_gates_that_are_no_whole_vectors(
    family: str, changes: dict[str, int], tiny: Callable[..., Path]
) -> None:
    """Of shared experts and of attention, in the families' own code."""
    same_bits(cut(open_checkpoint(tiny(family, **changes)), 1), "gates")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["kimi-linear", "nemotron-h"])
def test_families_that_tie_no_embedding(family: str, tiny: Callable[..., Path]) -> None:
    """Whatever their configuration says, transformers gives them a head of its own."""
    path, prompt = tiny(family, tie_word_embeddings=True), [5, 17, 99]
    checkpoint = open_checkpoint(path)
    stages = cut(checkpoint, 2)
    assert decode(stages, prompt, 6) == generated(path, prompt, 6)
    (whole,) = cut(checkpoint, 1, mode="fast")
    foretold = footprint(path, checkpoint.info, (0, LAYERS), "float32", "fast")
    assert foretold.weights == pytest.approx(whole.shard.weight_bytes, rel=0.02)


def test_lists_that_are_not_by_layer_stay_whole() -> None:
    """As long as the model is deep."""
    kinds, limits = ["full_attention", "linear_attention"], [0.01, 0.5]
    config = AutoConfig.for_model("nemotron_h", layers_block_type=kinds, time_step_limit=limits)
    last = sub_config(config, 1, 2)
    assert (last.layers_block_type, last.time_step_limit) == (kinds[1:], limits)


def test_a_model_type_of_its_publisher(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Kimi K2 is a DeepSeek-V3."""
    shutil.copytree(tiny("deepseek-v3"), tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"model_type": "kimi_k2"}))
    said = decode(cut(open_checkpoint(tmp_path), 1), [5, 17, 99], 4)
    assert said == decode(cut(open_checkpoint(tiny("deepseek-v3")), 1), [5, 17, 99], 4)


def test_sparse_attention_within_what_it_chooses(
    tiny: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    info = open_checkpoint(tiny("deepseek-v3.2")).info
    assert info.context_length == 256
    assert "top-k of its sparse attention" in LimitsTable().reason_of(info)
    assert not LimitsTable(context=100).reason_of(info)
    assert "no longer than that" in caplog.text


def test_every_claimed_family_is_tried(tiny: Callable[..., Path]) -> None:
    tried = (open_checkpoint(tiny(family)).info.architecture for family in FAMILIES | PLAIN)
    assert set(tried) == {name for name in SUPPORTED if hasattr(transformers, name)}
