"""Next-token layers of every published layout against a head without a cache; a whole cluster
against transformers' ``generate``; and what is said of a checkpoint that has none."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.hf.backend import BACKEND
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.heads.mtp.head import load_mtp, mtp_footprint
from asyncspec_nodes.cluster.automatic import choose
from backend import tiny
from backend.eagle_growth import extend, grow
from backend.mtp_models import EXTRA, LAYERS, WEIGHTS, PlainMTP, save_mtp
from backend.quantized_checkpoints import PUBLISHED, publish
from backend.test_eagle_source import paths
from backend.tiny import VOCAB

pytestmark = pytest.mark.torch

# Three layers, and the next-token layer.
GATED = {"layer_types": ["linear_attention", "full_attention"] * 2}
MOE = {"decoder_sparse_step": 2, "mlp_only_layers": [], "num_experts": 4}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek": ("deepseek", "qwen3", {}),
    "deepseek-llama-tied": ("deepseek", "llama", {"tie_word_embeddings": True}),
    "qwen": ("qwen", "qwen3", {}),
    # Whether layers have experts depends on their numbers.
    "qwen-experts": ("qwen", "qwen3-moe", MOE),
    "mimo": ("mimo", "qwen2", {}),
    "qwen3.5": ("qwen", "qwen3.5", GATED),
    "qwen3.5-moe": ("qwen", "qwen3.5-moe", GATED),
    "qwen3-next": ("qwen", "qwen3-next", GATED | {"decoder_sparse_step": 1, "mlp_only_layers": []}),
    "deepseek-v3": ("deepseek", "deepseek-v3", {}),
    "glm4-moe": ("deepseek", "glm4-moe", {}),
    "glm4-moe-lite": ("deepseek", "glm4-moe-lite", {}),
}
KNOWN = tiny.FAMILIES | getattr(tiny, "PLAIN", {})
CASES = {name: case for name, case in CASES.items() if case[1] in KNOWN}
"""Of families whose stages are there."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_tree_is_that_of_the_formulas(
    case: tuple[str, str, dict[str, Any]], tmp_path: Path
) -> None:
    layout, family, changes = case
    path = save_mtp(tmp_path / "target", layout, family, **changes)
    source = load_mtp(open_checkpoint(path))
    plain = PlainMTP(path, layout, from_one=family.startswith(("qwen3.5", "qwen3-next")))
    features = torch.randn(40, 64, generator=torch.Generator().manual_seed(7))
    random = Random(3)
    tokens = [random.randrange(VOCAB) for _ in range(40)]
    known = 0
    for end in (30, 31, 34):
        extend(source, features[known:end], tokens[known:end])
        got, want = grow(source, 4, 4, 14), plain.grow(features[:end], tokens[:end], 4, 4, 14)
        assert paths(got) == paths(want)
        assert got[2] == pytest.approx(want[2], abs=2e-3)
        source.check()
        known = end


@pytest.mark.parametrize("published", ["awq", "fp8-blocks"])
def test_a_quantised_target(published: str, tmp_path: Path) -> None:
    """Its own join and layer are quantised too."""
    path = save_mtp(tmp_path / "target", "deepseek", "qwen3", intermediate_size=96)
    path, dense = publish(path, tmp_path, PUBLISHED[published])
    checkpoint = open_checkpoint(path)
    source, plain = load_mtp(checkpoint), PlainMTP(dense, "deepseek")
    features = torch.randn(30, 64, generator=torch.Generator().manual_seed(7))
    tokens = [*range(30)]
    extend(source, features, tokens)
    got, want = grow(source, 1, 4, 4), plain.grow(features, tokens, 1, 4, 4)
    assert len({*got[1]} & {*want[1]}) > 2
    assert got[2] == pytest.approx(want[2], abs=0.2)
    check_memory(path)


def test_of_several_layers_the_first_drafts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_mtp(tmp_path / "target", "deepseek")
    one = load_mtp(open_checkpoint(path))
    assert not caplog.records
    state = load_file(path / WEIGHTS)
    second = EXTRA.replace(str(LAYERS), str(LAYERS + 1))
    more = {second + n.removeprefix(EXTRA): 2 * x for n, x in state.items() if n.startswith(EXTRA)}
    broken(path, dict(more))
    file = path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    two = load_mtp(open_checkpoint(path))
    assert "of the 2 next-token layers" in caplog.text
    features = torch.randn(9, 64, generator=torch.Generator().manual_seed(7))
    for source in (one, two):
        extend(source, features, [*range(9)])
    assert grow(one, 4, 4, 14) == grow(two, 4, 4, 14)


def test_memory_equals_the_reported_footprint(tmp_path: Path) -> None:
    check_memory(save_mtp(tmp_path / "target", "qwen", "qwen3-moe", **MOE))


def check_memory(path: Path) -> None:
    said, source = (
        mtp_footprint(open_checkpoint(path).files, "auto"),
        load_mtp(open_checkpoint(path)),
    )
    head: Any = source.head
    held = head._shard.weight_bytes + head._join.bytes_held
    held += head._embedding.weight.nbytes
    assert said.slot == source.token_bytes
    assert said.weights == pytest.approx(held, rel=0.02)


def test_auto_takes_next_token_layers(tmp_path: Path) -> None:
    path = save_mtp(tmp_path / "target", "deepseek")
    for apart in (False, True):
        assert choose(str(path), stages_here=1.0, apart=apart).source == "mtp+ngram"


def test_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    path = save_mtp(tmp_path / "target", "qwen", "qwen3.5", **GATED)
    file = path / "config.json"
    text = json.loads(file.read_text())
    text.pop("num_nextn_predict_layers")
    config = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": text | {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1},
        "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 64},
        "tie_word_embeddings": False,
    }
    file.write_text(json.dumps(config))
    state = load_file(path / WEIGHTS)
    inner = {
        "model.language_model." + name.removeprefix("model.") if "model." in name else name: tensor
        for name, tensor in state.items()
    }
    save_file(inner, path / WEIGHTS, {"format": "pt"})
    check_memory(path)


def broken(path: Path, change: dict[str, torch.Tensor | None]) -> None:
    state: dict[str, Any] = load_file(path / WEIGHTS) | change
    save_file({k: v for k, v in state.items() if v is not None}, path / WEIGHTS, {"format": "pt"})


SPOILED: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "no join": ({f"{EXTRA}eh_proj.weight": None}, "saved without the next-token layers"),
    "no norm": ({f"{EXTRA}hnorm.weight": None}, r"has no tensor .*hnorm.weight, which mtp needs"),
    "join": ({f"{EXTRA}eh_proj.weight": torch.ones(64, 64)}, r"\[64, 64\], expected \[64, 128\]"),
    "NaN": ({f"{EXTRA}enorm.weight": torch.full((64,), torch.nan)}, "enorm.weight .* holds NaN"),
    "inf": (
        {f"{EXTRA}mlp.up_proj.weight": torch.full((100, 64), torch.inf)},
        "up_proj.weight .* holds NaN or infinite",
    ),
    "layer": ({f"{EXTRA}mlp.up_proj.weight": None}, "next-token layer .* missing tensors"),
    "shape": (
        {f"{EXTRA}mlp.up_proj.weight": torch.ones(10, 64)},
        "next-token layer .* mismatched tensors",
    ),
}


@pytest.mark.parametrize(("change", "said"), SPOILED.values(), ids=SPOILED.keys())
def test_a_broken_layer_is_one_line(
    change: dict[str, torch.Tensor | None], said: str, tmp_path: Path
) -> None:
    path = save_mtp(tmp_path / "target", "deepseek")
    broken(path, change)
    with pytest.raises(CheckpointError, match=said) as raised:
        load_mtp(open_checkpoint(path))
    assert "\n" not in str(raised.value)


def test_a_checkpoint_without_next_token_layers_says_what_it_lacks(tmp_path: Path) -> None:
    path = save_mtp(tmp_path / "target", "qwen")
    state = load_file(path / WEIGHTS)
    broken(path, {name: None for name in state if name.startswith("mtp.")})
    said = f"model.layers.{LAYERS}.eh_proj.weight, mtp.fc.weight, model.mtp_layers.0.input_proj"
    with pytest.raises(CheckpointError, match=f"saved without .*{said}"):
        BACKEND.check_source("mtp", str(path))
    file = path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(CheckpointError, match=f"no next-token layers .*{said}"):
        BACKEND.check_source("mtp", str(path))
