"""Layers that compute alike are found, and those that do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncspec.plugins.hf.attention.attention import TreeAttention
from asyncspec.plugins.hf.attention.block_attention import BlockAttention
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.kernels.probing import layer_kind, layers_with_all_kinds
from asyncspec.plugins.hf.model import shard as shards
from backend.probe import cut
from backend.products import PRODUCTS, Product, use
from backend.tiny import LAYERS

pytestmark = pytest.mark.torch

MakeTiny = Callable[..., Path]


@pytest.mark.parametrize(
    ("family", "fewest"),
    [
        ("llama", 1),
        ("llama-odd", 1),
        ("olmo2", 1),
        ("mixtral", 1),
        ("gemma2", 2),
        ("gemma3", 2),
        ("qwen2-window", 2),
        # Without rotary embedding in the fourth; with experts in every second but the fourth.
        ("smollm3", 4),
        ("qwen3-moe-mixed", 2),
    ],
)
def test_kinds_of_layers_are_distinguished(family: str, fewest: int, tiny: MakeTiny) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny(family))
    assert layers_with_all_kinds(model.model.layers) == fewest


def test_shapes_types_and_settings_make_kinds() -> None:
    parts = [
        torch.nn.Linear(4, 4),
        torch.nn.Linear(4, 5),
        torch.nn.Linear(4, 4, bias=False),
        torch.nn.Linear(4, 4, dtype=torch.float16),
        torch.nn.LayerNorm(4),
        torch.nn.LayerNorm(4, eps=1e-3),
    ]
    assert len({layer_kind(torch.nn.Sequential(part)) for part in parts}) == len(parts)
    assert layers_with_all_kinds([parts[0], torch.nn.Linear(4, 4), parts[1], parts[0]]) == 3


def seen_layers(product: Product, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> Sequence[int]:
    """How many layers the passes of a stage's start went through."""
    seen: dict[int, set[int]] = {}

    def watch(kind: Any, name: str) -> None:
        mix = getattr(kind, name)

        def watched(self: Any, asked: Any, *rows: Any) -> Any:
            seen.setdefault(id(self.cache), set()).add(asked.layer)
            return mix(self, asked, *rows)

        monkeypatch.setattr(kind, name, watched)

    watch(TreeAttention, "compute")
    # Of tensors and of arrays.
    watch(BlockAttention, "_compute_arrays")
    path, dtype = use(product, monkeypatch, tiny, "gemma3")
    (stage,) = cut(open_checkpoint(path), 1, dtype)
    assert stage.guarantee == "bitwise"
    assert len(stage.shard.model.model.layers) == LAYERS
    return sorted(set(map(len, seen.values())))


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_stage_is_tried_with_few_of_its_layers(
    product: Product, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert seen_layers(product, tiny, monkeypatch) == [4]


@pytest.mark.parametrize("product", PRODUCTS)
def test_but_with_all_kinds_of_them(
    product: Product, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_MIN_PROBE_LAYERS", 1)
    assert seen_layers(product, tiny, monkeypatch) == [2]
