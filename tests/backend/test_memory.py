"""A stage's process holds its share of the weights, its cache and a constant, at every moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from asyncspec.backend.hf.threads import SETTINGS
from asyncspec.backend.hf.weights import list_tensors

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="reads /proc"),
]

MIB = 1 << 20
LAYERS, HIDDEN, INNER, VOCAB, KV = 8, 1024, 2816, 16000, 256
LOADING = 48
"""MiB beyond what importing takes and the weights: one linear layer twice, the self-test's kernels
(oneDNN keeps half a MiB for each weight shape and row count)."""
RUNNING = LOADING + 32
"""MiB beyond weights and cache: activations of 64 rows, more kernels."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 240 MiB of bfloat16 weights in two files."""
    directory = tmp_path_factory.mktemp("large")
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=VOCAB,
        max_position_embeddings=2048,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(directory)
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).mul_(0.03).bfloat16()

    files: list[dict[str, torch.Tensor]] = [{}, {}]
    files[0]["model.embed_tokens.weight"] = weight(VOCAB, HIDDEN)
    files[1]["lm_head.weight"] = weight(VOCAB, HIDDEN)
    files[1]["model.norm.weight"] = torch.ones(HIDDEN).bfloat16()
    for i in range(LAYERS):
        part, layer = files[2 * i // LAYERS], f"model.layers.{i}."
        for name, shape in {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KV, HIDDEN),
            "self_attn.v_proj": (KV, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }.items():
            part[f"{layer}{name}.weight"] = weight(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            part[f"{layer}{name}.weight"] = torch.ones(HIDDEN).bfloat16()
    weight_map: dict[str, str] = {}
    for i, part in enumerate(files):
        save_file(part, directory / f"part{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"part{i}.safetensors")
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return directory


def measure(small: Path, large: Path, first: int, last: int) -> dict[str, float]:
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("memory_child.py")),
            *(str(x) for x in (small, large, first, last, 1024)),
        ],
        check=True,
        env=os.environ | SETTINGS,
        capture_output=True,
        timeout=100,
    )
    sizes: dict[str, float] = json.loads(done.stdout)
    return sizes


@pytest.mark.parametrize(("first", "last"), [(0, 4), (4, 8), (2, 4)])
def test_a_stage_takes_its_share(
    tiny: Callable[..., Path], large: Path, first: int, last: int
) -> None:
    tensors = list_tensors(large)
    layers = [f"model.layers.{i}." for i in range(first, last)]
    mine = [info.size for name, info in tensors.items() if name.startswith(tuple(layers))]
    if first == 0:
        mine.append(tensors["model.embed_tokens.weight"].size)
    if last == LAYERS:
        mine.append(tensors["lm_head.weight"].size)
    weights = sum(mine) / MIB
    whole = sum(info.size for info in tensors.values()) / MIB
    assert weights < 0.51 * whole
    sizes = measure(tiny("llama", dtype=torch.bfloat16), large, first, last)
    report = {"weights": weights, **sizes}
    assert sizes["read"] < weights + 4, report
    taken = {name: size - sizes["base"] for name, size in sizes.items()}
    cache = sizes["cache"]
    assert taken["loaded"] < weights + LOADING, report
    assert taken["loading_peak"] < weights + LOADING, report
    # Growing holds the old cache beside the new one for a moment.
    assert taken["running_peak"] < weights + 2 * cache + RUNNING, report
    assert taken["full"] < weights + 1.5 * cache + RUNNING, report
    assert taken["released"] < weights + RUNNING, report
