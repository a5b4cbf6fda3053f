"""Attention's products: numbers of rows that give each row the same bits, here and elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.kv_slots import BLOCK
from asyncspec.plugins.hf.attention.cache import ONES, KVCache, LayerShape, uniform_shape
from asyncspec.plugins.hf.kernels.cpu.capabilities import RowTiles, multiplies_bfloat16
from asyncspec.plugins.hf.kernels.cpu.elementwise import exp2_
from asyncspec.plugins.hf.kernels.cpu.half_precision import query_key_products
from asyncspec.plugins.hf.kernels.probing import noise
from asyncspec.plugins.hf.model import self_test
from asyncspec.plugins.hf.model.self_test import row_tiles_of
from backend.probe import same_bits_in_child
from effort import NIGHTLY

pytestmark = pytest.mark.torch

HEADS = 2
GROUPS = 3


@given(st.integers(1, 24), st.integers(0, 4), st.integers(1, 200))
def test_parts_are_whole_strips_of_all_rows(multiple: int, times: int, rows: int) -> None:
    row_tiles = RowTiles(multiple, multiple * times or None)
    whole = row_tiles.padded(rows)
    assert rows <= whole < rows + row_tiles.multiple
    parts = row_tiles.parts(whole)
    assert [row for start, count in parts for row in range(start, start + count)] == [*range(whole)]
    assert all(not count % row_tiles.multiple for _, count in parts)
    assert all(count <= (row_tiles.max_rows or whole) for _, count in parts)
    assert row_tiles.one_product(whole) == (len(parts) == 1)


@cache
def found(width: int, dtype: torch.dtype) -> RowTiles:
    row_tiles = row_tiles_of([LayerShape(HEADS, width, width, GROUPS)], dtype)
    assert row_tiles is not None
    return row_tiles


@given(
    width=st.sampled_from([16, 24, 64, 80, 128, 256]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    rows=st.integers(1, 100),
    place=st.integers(0, 1 << 20),
    blocks=st.integers(1, 20),
)
def test_a_row_has_the_same_bits_anywhere(
    width: int, dtype: torch.dtype, rows: int, place: int, blocks: int
) -> None:
    row_tiles = found(width, dtype)
    heads, columns, few = HEADS, width + ONES, row_tiles.padded(1)
    many = max(count for _, count in row_tiles.parts(row_tiles.padded(rows)))
    place %= many
    keys = noise(heads, blocks * BLOCK, width).to(dtype)
    query = noise(heads, many, width, seed=1).to(dtype)
    alone = query[:, place : place + 1].expand(-1, few, -1).contiguous()
    assert torch.equal(
        query_key_products(query, keys)[:, place, :BLOCK],
        query_key_products(alone, keys[:, :BLOCK])[:, 0],
    )
    values, weights = noise(heads, BLOCK, columns, seed=2), noise(heads, many, BLOCK)
    start = noise(heads, many, columns, seed=3)
    want, by = (x[:, place : place + 1].expand(-1, few, -1).contiguous() for x in (start, weights))
    got = torch.baddbmm(start, weights, values)[:, place]
    assert torch.equal(got, torch.baddbmm(want, by, values)[:, 0])


@pytest.mark.skipif(not multiplies_bfloat16(), reason="oneDNN does not multiply bfloat16 here")
def test_keys_of_a_cache_are_not_transposed_in_memory() -> None:
    """oneDNN's product has its operands brought into order where heads lie apart, as the first
    slots of a cache do: a number at a time."""
    cache = KVCache(uniform_shape(1, HEADS, 64, torch.bfloat16, exact=True), 4 * BLOCK)
    cache.reserve(4 * BLOCK)
    keys, _ = cache.read(0, 3 * BLOCK)
    with torch.profiler.profile() as profile:
        query_key_products(noise(HEADS, 8, 64).bfloat16(), keys)
    (product,) = [event for event in profile.events() or () if event.name == "aten::bmm"]
    parts = {part.name for part in product.cpu_children}
    assert not parts & {"aten::contiguous", "aten::clone", "aten::copy_"}


@pytest.mark.parametrize("threads", [2, 3])
def test_powers_do_not_depend_on_where_threads_cut_a_tensor(threads: int) -> None:
    """torch's own do: the last elements of a share are computed one by one, in other code."""
    one_thread = torch.get_num_threads()
    for vectors in range(1536, 1552):
        x = noise(1, vectors * 64).abs_().mul_(-9)
        want = exp2_(x.clone())
        assert torch.allclose(want, torch.exp(x * math.log(2)), rtol=1e-5)
        torch.set_num_threads(threads)
        try:
            got = exp2_(x.clone())
        finally:
            torch.set_num_threads(one_thread)
        assert torch.equal(got, want)


def test_strips_that_do_not_hold_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a product whose last rows of eight are odd, as MKL's are where there is no AVX-512."""
    baddbmm = torch.baddbmm

    def odd(start: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        out = baddbmm(start, left, right)
        rows = out.shape[1]
        if rows > 48:
            return out + 1
        out[:, rows - rows % 6 :] += 1
        return out

    monkeypatch.setattr(torch, "baddbmm", odd)
    layers = [LayerShape(HEADS, 32, 32, GROUPS)]
    assert row_tiles_of(layers, torch.float32) == RowTiles(6, 48)
    monkeypatch.setattr(self_test, "_KNOWN_TILES", (RowTiles(), RowTiles(16)))
    assert row_tiles_of(layers, torch.float32) is None


@pytest.mark.slow
def test_trees_on_kernels_without_avx512(tiny: Callable[..., Path]) -> None:
    """MKL's of Intel's CPUs for homes, where it is MKL and can be asked for them."""
    paths = [
        tiny(
            "llama",
            hidden_size=96,
            head_dim=64,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
        )
        for heads, kv_heads in (((8, 8), (4, 2), (6, 2), (16, 1)) if NIGHTLY else ((6, 2), (16, 1)))
    ]
    found = same_bits_in_child(paths, 1, "float32", MKL_ENABLE_INSTRUCTIONS="AVX2")
    assert found == ["float32"] * len(paths)
