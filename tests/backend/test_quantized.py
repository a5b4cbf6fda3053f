"""Weight-only quantised linears: how far off they are, and that rows do not see each other."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.plugins.hf.checkpoint.packed import quantize
from asyncspec.plugins.hf.kernels.cpu import nbits
from asyncspec.plugins.hf.kernels.cpu.capabilities import KernelSettings
from asyncspec.plugins.hf.kernels.cpu.dense import dense_linear
from asyncspec.plugins.hf.kernels.cpu.linear import RowwiseLinear
from asyncspec.plugins.hf.kernels.cpu.nbits import (
    NBitsLinear,
    block_of,
    multiplies_levels,
    packed_bytes,
    packed_linear,
)
from asyncspec.plugins.hf.kernels.cpu.quantized import (
    GROUP,
    Int4Linear,
    Int8Linear,
    PackedInt4Linear,
    group_of,
    quantize_int4,
    quantize_int8,
)
from asyncspec.plugins.hf.kernels.probing import noise
from asyncspec.plugins.hf.model.self_test import min_invariant_rows

pytestmark = pytest.mark.torch

KINDS: dict[str, type[Int8Linear] | type[Int4Linear]] = {"int8": Int8Linear, "int4": Int4Linear}
PACKED = {"packed int8": 8, "packed int4": 4}
ALL = [*KINDS, *(PACKED if multiplies_levels() else ())]
BOUND = {"int8": 0.015, "int4": 0.12, "packed int8": 0.015, "packed int4": 0.12}
# Ragged on purpose: the kernels alone would read beyond the end of such rows.
SHAPES = st.tuples(st.integers(1, 200), st.integers(1, 300))


def made(
    kind: str, weight: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> RowwiseLinear:
    shape, read = tuple(weight.shape), partial(rows_of, weight)
    if kind in PACKED:
        matrix = quantize(read, shape, PACKED[kind], block_of(shape[1]))
        return NBitsLinear(matrix, bias, dtype)
    return KINDS[kind](shape, read, dtype, bias)


def rows_of(weight: torch.Tensor, first: int, end: int) -> torch.Tensor:
    return weight[first:end]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(256, 512), (100, 96), (151, 88), (33, 1000), (2, 24)])
def test_errors_are_bounded(kind: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, bias = noise(*shape) / math.sqrt(shape[1]), noise(shape[0], seed=1).to(dtype)
    x = noise(2, 64, shape[1], seed=2).to(dtype)
    linear = made(kind, weight, dtype)
    exact = x.float() @ weight.T
    assert linear(x).dtype == dtype
    assert 0 < error(linear(x), exact) < BOUND[kind]
    with_bias = made(kind, weight, dtype, bias)(x)
    # Packed ones add it before they round.
    assert error(with_bias, (linear(x) + bias).float()) < 0.005


# The one product that is tried when the matrix is packed cancels, to a fifth of its usual size.
@example(shape=(1, 155), seed=1, kind=ALL[-1])
@given(shape=SHAPES, seed=st.integers(0, 2**32), kind=st.sampled_from(sorted(ALL)))
def test_a_row_is_itself_among_any_others(shape: tuple[int, int], seed: int, kind: str) -> None:
    linear = made(kind, noise(*shape, seed=seed), torch.bfloat16)
    x = noise(70, shape[1], seed=seed + 1).bfloat16()
    together = linear(x)
    assert not together.isnan().any()
    for rows in (1, 2, 3, 4, 5, 16, 33, 64):
        assert torch.equal(linear(x[:rows]), together[:rows])
    assert torch.equal(linear(x.flip(0)), together.flip(0))
    assert min_invariant_rows([linear]) == 1


@pytest.mark.skipif(not multiplies_levels(), reason="without onnxruntime's products")
def test_odd_rows_are_padded() -> None:
    """In blocks of 128 a lone last row's are added up in another order."""
    linear, x = made("packed int4", noise(64, 512), torch.float32), noise(33, 512, seed=1)
    whole = linear(x)
    assert {rows: linear.computed_rows(rows) for rows in (1, 2, 33)} == {1: 2, 2: 2, 33: 34}
    assert all(torch.equal(linear(x[:rows]), whole[:rows]) for rows in range(1, 33))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind: str) -> None:
    """The same weights with columns and rows of zeros behind them are the same layer."""
    weight, x = noise(50, 70), noise(5, 70, seed=1).bfloat16()
    wide = torch.nn.functional.pad(weight, (0, 26, 0, 30))
    padded = made(kind, wide, torch.bfloat16)(torch.nn.functional.pad(x, (0, 26)))
    assert torch.equal(made(kind, weight, torch.bfloat16)(x), padded[:, :50])
    assert not padded[:, 50:].any()


@given(rows=st.integers(1, 9), width=st.integers(1, 40), seed=st.integers(0, 2**32))
def test_int8_is_off_by_half_a_step(rows: int, width: int, seed: int) -> None:
    dense = noise(rows, width, seed=seed)
    whole, scales = quantize_int8(dense)
    off = (whole.float() * scales.float()[:, None] - dense).abs()
    # The scale is a bfloat16: the largest weight may be cut by its rounding.
    cut = dense.abs().amax(1, keepdim=True) - 127 * scales.float()[:, None]
    assert (off <= torch.maximum(scales.float()[:, None] / 2, cut) * (1 + 1e-5)).all()


@given(rows=st.integers(1, 9), groups=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_int4_is_off_by_little_more_than_half_a_step(rows: int, groups: int, seed: int) -> None:
    dense = noise(rows, groups * 32, seed=seed)
    levels, steps = quantize_int4(dense, 32)
    scale, offset = (x.float().T.repeat_interleave(32, 1) for x in steps.unbind(-1))
    assert levels.min() >= 0
    assert levels.max() <= 15
    off = ((levels - 8) * scale + offset - dense).abs()
    # Scale and offset are bfloat16: the ends of a group may be cut by their rounding.
    assert (off <= scale / 2 + 16 * scale / 256 + offset.abs() / 256).all()


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("value", [0.0, 0.5, -3.0])
def test_constant_weights(kind: str, value: float) -> None:
    weight, x = torch.full((16, 64), value), torch.ones(3, 64).bfloat16()
    got = made(kind, weight, torch.float32)(x.float())
    assert torch.allclose(got, torch.full((3, 16), 64 * value), rtol=0.01)


def test_slices_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = noise(300, 96), noise(4, 96, seed=1).bfloat16()
    whole = {kind: made(kind, weight, torch.bfloat16)(x) for kind in KINDS}
    monkeypatch.setattr("asyncspec.plugins.hf.checkpoint.packed.SLICE", 1)
    for kind in KINDS:
        assert torch.equal(made(kind, weight, torch.bfloat16)(x), whole[kind])


def test_bytes() -> None:
    dense = dense_linear(noise(256, 512).bfloat16(), None, KernelSettings(), torch.bfloat16)
    int8, int4 = (made(kind, noise(256, 512), torch.bfloat16) for kind in ("int8", "int4"))
    for linear in (int8, int4):
        held = [x for x in vars(linear).values() if isinstance(x, torch.Tensor)]
        assert linear.weight_bytes == sum(x.numel() * x.element_size() for x in held)
    assert dense.weight_bytes / int8.weight_bytes == pytest.approx(2, rel=0.01)
    assert dense.weight_bytes / int4.weight_bytes == pytest.approx(2 / (0.5 + 4 / GROUP), rel=0.01)


@pytest.mark.parametrize("shape", [(48, 256), (33, 128), (16, 96)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_kernels_multiply_what_a_packed_matrix_says(
    shape: tuple[int, int], symmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever quantised it, by onnxruntime's kernels or torch's; memory as foretold."""
    weight, x = noise(*shape), noise(5, shape[1], seed=1)
    found = quantize(partial(rows_of, weight), shape, 4, 32)
    matrix = replace(found, zero_points=None) if symmetric else found
    want = x @ matrix.dequantized().T
    kinds = [packed_linear(matrix, None, torch.float32)]
    monkeypatch.setattr(nbits, "multiplies_levels", lambda: False)
    kinds.append(packed_linear(matrix, None, torch.float32))
    assert type(kinds[1]) is PackedInt4Linear
    for linear in kinds:
        assert error(linear(x), want) < 0.012
    if multiplies_levels():
        assert type(kinds[0]) is NBitsLinear
        assert kinds[0].weight_bytes == packed_bytes(*shape, 4, 32, symmetric=symmetric)


def test_eight_bits_without_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nbits, "multiplies_levels", lambda: False)
    weight, x = noise(48, 80), noise(5, 80, seed=1)
    matrix = quantize(partial(rows_of, weight), (48, 80), 8, 32)
    linear = packed_linear(matrix, None, torch.float32)
    assert type(linear) is Int8Linear
    assert error(linear(x), x @ matrix.dequantized().T) < 0.015


def test_groups_fit_the_inner_width() -> None:
    assert [group_of(width) for width in (24, 64, 88, 96, 100, 4096)] == [32, 64, 32, 32, 64, 64]
