"""Caches in 8 bits: how far their numbers are rounded, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from asyncspec.backend.base import DType, Mode
from asyncspec.backend.reference import decode
from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.hf.attention import q8
from asyncspec.plugins.hf.attention.cache import ONES, CacheShape, KVCache, LayerShape
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.kernels.device import find
from asyncspec.plugins.hf.model.footprint import footprint
from backend.probe import cut, same_bits
from backend.tiny import DEEPSEEK, LATENT, generated

pytestmark = pytest.mark.torch

NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-1e6, max_value=1e6)
LATENT_OF_32 = {"kv_lora_rank": 64, "qk_rope_head_dim": 32}


def rounded(x: Tensor) -> Tensor:
    out = torch.empty(x.shape)
    q8.dequantize(*q8.quantized(x), out)
    return out.to(x.dtype)


@given(st.lists(NUMBERS, min_size=2 * q8.GROUP, max_size=2 * q8.GROUP))
def test_numbers_move_by_half_a_level_at_most_and_stay_there(numbers: list[float]) -> None:
    x = torch.tensor(numbers).view(1, -1)
    got = rounded(x)
    largest = x.view(2, -1).abs().amax(1, keepdim=True)
    # Below the least scale of float16 there are no levels.
    bound = largest / 254 * (1 + 2**-10) + 127 * 2.0**-25
    assert bool(((got - x).abs().view(2, -1) <= bound).all())
    assert torch.equal(rounded(got), got)
    # Alone or among other rows.
    assert torch.equal(rounded(torch.cat([torch.ones_like(x), x]))[1:], got)


def test_levels_are_llama_cpps() -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    levels, scales = q8.quantized(x)
    packed = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType.Q8_0)
    theirs = packed.reshape(64, 3, 34)
    assert np.array_equal(theirs[..., :2].copy().view(np.float16)[..., 0], scales.numpy())
    # It divides by the scale before that is rounded.
    distance = theirs[..., 2:].view(np.int8).reshape(64, -1).astype(int) - levels.numpy()
    assert np.abs(distance).max() <= 1
    assert (distance != 0).mean() < 0.05


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_reads_what_was_rounded(exact: bool, dtype: torch.dtype) -> None:
    shape = CacheShape((LayerShape(2, 64, 32),), dtype, exact, quantized=True)
    cache, source = KVCache(shape, 128), KVCache(shape, 128)
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 5, n, generator=generator).to(dtype) for n in (64, 32))
    source.reserve(64)
    source.write(0, slice(0, 3), keys[:, :3], values[:, :3])
    source.write(0, torch.tensor([7, 5]), keys[:, 3:], values[:, 3:])
    source.positions[[0, 1, 2, 5, 7]] = range(5)
    source.compact(3, [5, 7])
    cache.copy_prefix(source, 5)
    cache.check(5)
    order = [0, 1, 2, 4, 3]
    read_keys, read_values = cache.read(0, 5)
    assert torch.equal(read_keys, rounded(keys)[:, order])
    wide = values.to(shape.value_dtype)
    assert torch.equal(read_values[..., :32], rounded(wide)[:, order])
    assert read_values.shape[2] == 32 + ONES * exact
    assert bool((read_values[..., 32:] == 1).all())
    assert cache.bytes_held == cache.slots * 2 * (64 + 32) * 34 // 32


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt-oss"])
def test_same_tokens_as_generate_with_a_rounded_cache(
    family: str, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, random, update = tiny(family), Random(family), DynamicCache.update

    def round_first(cache: Any, keys: Tensor, values: Tensor, *rest: Any, **named: Any) -> Any:
        return update(cache, rounded(keys), rounded(values), *rest, **named)

    monkeypatch.setattr(DynamicCache, "update", round_first)
    prompt = [random.randrange(3, 150) for _ in range(60)]
    want = generated(path, prompt, 12)
    checkpoint = open_checkpoint(path)
    modes: tuple[Mode, ...] = ("exact", "fast")
    for mode in modes:
        assert decode(cut(checkpoint, 3, mode=mode, kv_type="q8_0"), prompt, 12) == want


@pytest.mark.parametrize(
    ("family", "dtype", "changes"),
    [
        ("qwen3", "float32", {}),
        ("gemma3", "bfloat16", {}),
        ("qwen3.5", "float32", {}),
        ("deepseek-v3", "float32", DEEPSEEK | LATENT | LATENT_OF_32),
    ],
)
def test_tree_has_the_bits_of_the_sequence(
    family: str, dtype: DType, changes: dict[str, Any], tiny: Callable[..., Path]
) -> None:
    path = tiny(family, **changes)
    checkpoint = open_checkpoint(path)
    stages = cut(checkpoint, 2, dtype=dtype, kv_type="q8_0")
    same_bits(stages, family)
    plain = cut(checkpoint, 2, dtype=dtype)
    for first, mine, wide in zip((0, 2), stages, plain, strict=True):
        span = (first, first + len(mine.shard.layers))
        said = footprint(path, checkpoint.info, span, dtype, "exact", kv_type="q8_0")
        assert said.slot == mine.shard.cache_shape("exact").slot_bytes()
        assert mine.cache_bytes(1) < wide.cache_bytes(1) / 2 or not said.slot
        assert said.session == mine.session_bytes == wide.session_bytes


def test_an_accelerators_kernel_for_paths_reads_no_8_bits(tiny: Callable[..., Path]) -> None:
    device = find("emulated-paths")
    path = tiny("qwen3")
    checkpoint = open_checkpoint(path)
    stages = cut(checkpoint, 2, device=device, kv_type="q8_0")
    assert [stage.shard.path_kernel for stage in stages] == [None, None]
    same_bits(stages, "paths")
    said = footprint(
        path, checkpoint.info, (0, 2), "float32", "exact", kv_type="q8_0", device=device.name
    )
    assert said.slot == stages[0].cache_bytes(1)


def test_heads_that_are_no_multiple_of_32_are_refused(tiny: Callable[..., Path]) -> None:
    path = tiny("llama")
    checkpoint = open_checkpoint(path)
    for refused in (
        lambda: cut(checkpoint, 1, kv_type="q8_0"),
        lambda: footprint(path, checkpoint.info, (0, 2), "auto", "exact", kv_type="q8_0"),
    ):
        with pytest.raises(CheckpointError, match="heads of a multiple of 32 numbers, and these"):
            refused()
