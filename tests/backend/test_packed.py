"""The form of block-quantised matrices: levels are kept bit for bit, rounding is bounded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.plugins.hf.checkpoint import packed
from asyncspec.plugins.hf.checkpoint.packed import (
    PackedMatrix,
    pack_levels,
    quantize,
    unpack_levels,
)
from asyncspec.plugins.hf.kernels.probing import noise

pytestmark = pytest.mark.torch

BITS, BLOCKS = st.sampled_from([4, 8]), st.sampled_from([16, 32, 128])


def made(dense: torch.Tensor, bits: int, block: int) -> PackedMatrix:
    return quantize(lambda a, b: dense[a:b], tuple(dense.shape), bits, block)


@given(rows=st.integers(1, 5), pairs=st.integers(1, 40), seed=st.integers(0, 2**32), bits=BITS)
def test_levels_come_back(rows: int, pairs: int, seed: int, bits: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(2**bits, (rows, 2 * pairs), generator=generator)
    values = pack_levels(levels, bits)
    assert values.shape == (rows, 2 * pairs * bits // 8)
    assert torch.equal(unpack_levels(values, bits), levels.to(torch.uint8))


@given(rows=st.integers(1, 9), width=st.integers(1, 300), seed=st.integers(0, 2**32))
def test_symmetric_weights_are_exact(rows: int, width: int, seed: int) -> None:
    """8 bits: what is read is what a weight is by definition, and quantising it again is exact."""
    one = made(noise(rows, width, seed=seed), 8, 32)
    levels = unpack_levels(one.values, 8)[:, :width].float() - 128
    weights = levels * one.scales.repeat_interleave(32, 1)[:, :width]
    assert torch.equal(one.dequantized(), weights)
    assert torch.equal(one.read(1, rows), weights[1:])
    assert torch.equal(made(weights, 8, 32).values, one.values)


@given(
    rows=st.integers(1, 9),
    width=st.integers(1, 300),
    seed=st.integers(0, 2**32),
    bits=BITS,
    block=BLOCKS,
)
def test_weights_are_off_by_half_a_step(
    rows: int, width: int, seed: int, bits: int, block: int
) -> None:
    dense = noise(rows, width, seed=seed)
    one = made(dense, bits, block)
    assert one.shape == (rows, width)
    off = packed.pad_columns((one.dequantized() - dense).abs(), block).view(rows, -1, block)
    # Of 4 bits a block's range may be cut, where that brings down the sum of squared errors; at
    # both ends by less than the part it is shrunk by.
    ends = packed.pad_columns(dense.abs(), block).view(rows, -1, block).amax(-1)
    cut = (1 - min(packed._SHRINKS)) * ends if bits == 4 else torch.zeros_like(ends)
    assert (off.amax(-1) <= (one.scales + cut) * (1 if bits == 4 else 0.5) + 1e-5).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [0.0, 0.5, -3.0])
def test_constant_weights(bits: int, value: float) -> None:
    dense = torch.full((3, 70), value)
    assert torch.allclose(made(dense, bits, 32).dequantized(), dense)


def test_zero_points_move_levels() -> None:
    values = pack_levels(torch.tensor([[0, 15] * 8]), 4)
    one = PackedMatrix(4, 16, 16, values, torch.tensor([[2.0]]))
    assert one.dequantized()[0, :2].tolist() == [-16, 14]
    moved = PackedMatrix(4, 16, 15, values, torch.tensor([[2.0]]), torch.tensor([[3]]).byte())
    assert moved.dequantized()[0, :2].tolist() == [-6, 24]
    assert moved.shape == (1, 15)
    assert moved.bytes_held == 8 + 4 + 1


def test_slices_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = noise(40, 96)
    whole = made(dense, 4, 32)
    monkeypatch.setattr(packed, "SLICE", 1)
    again = made(dense, 4, 32)
    assert torch.equal(again.dequantized(), whole.dequantized())
