"""A stage's process holds its share of the weights, its cache and a constant, at every moment."""

from __future__ import annotations

import functools
import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from asyncspec.plugins.hf.checkpoint.files.headers import list_tensors
from asyncspec.plugins.hf.kernels.cpu.capabilities import product_type
from asyncspec_nodes.cli import main as cli
from backend import draft_memory_child, memory_child
from backend.memory_child import MIB, SESSIONS
from effort import nightly

T = TypeVar("T")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="reads /proc"),
]

LAYERS, HIDDEN, INNER, VOCAB, KV = 12, 1024, 2816, 24000, 256
CAPACITY = 1024
TIMEOUT = 250.0
"""Seconds, of a measurement."""
LOADING = 48
"""MiB beyond what importing takes and the weights: one linear layer twice, the self-test's kernels
(oneDNN keeps half a MiB for each weight shape and row count)."""
RUNNING = LOADING + 32
"""MiB beyond weights and cache: activations of 64 rows, more kernels."""


FILES = {"bfloat16": "large", "float16": "half", "float32": "larger"}
"""Fixtures by what their weights are stored as."""


def save_large(directory: Path, dtype: torch.dtype) -> Path:
    """About 350 MiB of bfloat16 weights, or twice that, in four files."""
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=VOCAB,
        max_position_embeddings=2048,
        architectures=["LlamaForCausalLM"],
        dtype=str(dtype).removeprefix("torch."),
    )
    config.save_pretrained(directory)
    generator = torch.Generator().manual_seed(0)

    noise = torch.randn(INNER, HIDDEN, generator=generator).mul_(0.03).to(dtype)

    def weight(*shape: int) -> torch.Tensor:
        """The same numbers in each tensor, in other places."""
        rows = torch.randint(INNER, (shape[0] * shape[1] // HIDDEN,), generator=generator)
        return noise[rows].reshape(shape)

    files: list[dict[str, torch.Tensor]] = [{} for _ in range(4)]
    files[0]["model.embed_tokens.weight"] = weight(VOCAB, HIDDEN)
    files[3]["lm_head.weight"] = weight(VOCAB, HIDDEN)
    files[3]["model.norm.weight"] = torch.ones(HIDDEN, dtype=dtype)
    for i in range(LAYERS):
        part, layer = files[4 * i // LAYERS], f"model.layers.{i}."
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
            part[f"{layer}{name}.weight"] = torch.ones(HIDDEN, dtype=dtype)
    weight_map: dict[str, str] = {}
    for i, part in enumerate(files):
        save_file(part, directory / f"part{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"part{i}.safetensors")
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return directory


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_large(tmp_path_factory.mktemp("large"), torch.bfloat16)


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_large(tmp_path_factory.mktemp("larger"), torch.float32)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_large(tmp_path_factory.mktemp("llama"), torch.float16)


def in_a_process(method: str, function: Callable[..., T], *arguments: object) -> T:
    """What it returns in a process of its own. ``method``: "spawn", or "forkserver", which forks it
    after the imports: pages of libraries that only these have read are not in its memory."""
    context = multiprocessing.get_context(method)
    context.set_forkserver_preload([memory_child.__name__])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result(TIMEOUT)


@functools.cache
def imports(small: Path) -> float:
    """What a node has in memory before it loads a model, MiB."""
    return in_a_process("spawn", memory_child.imports, str(small))


@functools.cache
def measure(
    small: Path,
    large: Path,
    layers: tuple[int, int],
    quantize: str,
    sessions: int,
) -> dict[str, float]:
    given = (str(small), str(large), *layers, CAPACITY, quantize, sessions)
    return in_a_process("forkserver", memory_child.main, *given)


def _packing() -> float:
    """MiB of the float32 form that the largest matrix of bfloat16, two in one, has while it is
    packed for a CPU that does not multiply bfloat16 (``half_precision.py``)."""
    converts = product_type(torch.bfloat16) != torch.bfloat16
    return 2 * INNER * HIDDEN * 4 / MIB if converts else 0.0


# A first stage's embedding and a last one's head are in the predictions below.
@pytest.mark.parametrize(("first", "last"), [nightly(0, 6), nightly(6, 12), (3, 6)])
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
    small = tiny("llama", dtype=torch.bfloat16)
    sizes = measure(small, large, (first, last), "none", SESSIONS)
    report = {"weights": weights, **sizes}
    assert sizes["read"] < weights + 4, report
    taken = {name: size - sizes["base"] for name, size in sizes.items()}
    cache = sizes["cache"]
    assert taken["loaded"] < weights + LOADING, report
    assert taken["loading_peak"] < weights + LOADING + _packing(), report
    # Growing holds one layer of the old cache beside the new one for a moment.
    assert cache <= sizes["held"] < 1.1 * cache
    assert taken["running_peak"] < weights + 1.25 * cache + RUNNING, report
    assert taken["full"] < weights + 1.1 * cache + RUNNING, report
    assert taken["released"] < weights + RUNNING, report
    # Several sessions, all but one of them ended, all of them ended.
    assert sizes["several_held"] == pytest.approx(SESSIONS * cache)
    assert sizes["several"] - sizes["released"] > 0.5 * sizes["several_held"], report
    assert sizes["one_is_left"] - sizes["released"] < cache + 16, report
    assert sizes["several_released"] - sizes["released"] < 16, report


@pytest.mark.parametrize(
    ("dtype", "stages", "rank", "quantize"),
    [
        pytest.param("bfloat16", 1, 1, "none", marks=pytest.mark.nightly),
        ("bfloat16", 2, 2, "none"),
        pytest.param("bfloat16", 1, 1, "int4", marks=pytest.mark.nightly),
        pytest.param("float16", 1, 1, "none", marks=pytest.mark.nightly),
        pytest.param("float32", 1, 1, "none", marks=pytest.mark.nightly),
        pytest.param("float32", 1, 1, "int8", marks=pytest.mark.nightly),
        pytest.param("bfloat16", 1, 1, "int8", marks=pytest.mark.nightly),
    ],
)
def test_the_peak_is_predicted(
    dtype: str,
    stages: int,
    rank: int,
    quantize: str,
    tiny: Callable[..., Path],
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path: Path = request.getfixturevalue(FILES[dtype])
    argv = ["memory", "--target", str(path), "--stages", str(stages), "--quantize", quantize]
    assert cli.main([*argv, "--context", str(CAPACITY), "--tree", "64", "--json"]) == 0
    foretold = json.loads(capsys.readouterr().out)["stages"][rank - 1]
    small = tiny("llama", dtype=getattr(torch, dtype))
    sizes = measure(small, path, tuple(foretold["layers"]), quantize, SESSIONS)
    peak = imports(tiny("llama", dtype=torch.bfloat16)) + sizes["running_peak"] - sizes["base"]
    share = peak * MIB / foretold["peak_bytes"]
    assert 0.8 < share <= 1, (share, sizes, foretold)


@pytest.mark.nightly
@pytest.mark.parametrize("twin", [None, "int4"])
def test_a_drafts_peak_is_predicted(
    twin: str | None, large: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = str(large) if twin is None else f"twin:{twin}"
    argv = ["memory", "--target", str(large), "--draft", draft, "--context", str(CAPACITY)]
    assert cli.main([*argv, "--tree", "64", "--json"]) == 0
    foretold = json.loads(capsys.readouterr().out)["draft"]
    peak = in_a_process("spawn", draft_memory_child.main, str(large), CAPACITY, twin or "none")
    share = peak / foretold["peak_bytes"]
    assert 0.8 < share <= 1, (share, peak, foretold)
