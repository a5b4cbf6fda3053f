"""Weights of 16 bits in float32 products: float16 ones, and bfloat16 ones where the CPU does not
multiply them, which is tried here on whatever CPU this is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from asyncspec.backend.reference import decode
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.kernels.cpu import capabilities, dense, half_precision, ort
from asyncspec.plugins.hf.kernels.cpu.capabilities import FAST, KernelSettings
from asyncspec.plugins.hf.kernels.cpu.dense import dense_linear
from asyncspec.plugins.hf.kernels.cpu.half_precision import (
    HalfLinear,
    UpcastLinear,
    fbgemm_rows,
    query_key_products,
)
from asyncspec.plugins.hf.kernels.cpu.linear import PackedLinear, RowwiseLinear
from asyncspec.plugins.hf.kernels.cpu.ort import MlasLinear
from asyncspec.plugins.hf.kernels.probing import noise
from asyncspec.plugins.hf.model.footprint import footprint
from asyncspec.plugins.hf.model.stage import HFStage
from asyncspec.testing.pipeline import sequential
from backend.probe import cut, same_bits
from backend.tiny import generated

pytestmark = pytest.mark.torch

MOST = 150
NEW = 32

fbgemm = pytest.mark.skipif(not capabilities.reads_half(), reason="this torch has no FBGEMM")
WAYS = [pytest.param(True, id="half", marks=fbgemm), pytest.param(False, id="slices")]
"""Whether FBGEMM is used."""


def layers(weight: torch.Tensor, bias: torch.Tensor | None) -> list[RowwiseLinear]:
    made: list[RowwiseLinear] = [UpcastLinear(weight, bias, KernelSettings())]
    return (
        [*made, HalfLinear(weight, bias, weight.dtype, KernelSettings())]
        if capabilities.reads_half()
        else made
    )


@pytest.fixture
def old_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """This CPU without products of bfloat16; FBGEMM as told."""

    def make(half: bool) -> None:
        monkeypatch.setattr(capabilities, "multiplies_bfloat16", lambda: False)
        monkeypatch.setattr(dense, "reads_half", lambda: half)

    return make


@given(st.integers(1, 2000))
def test_fbgemm_row_tiles_hold_all_rows(rows: int) -> None:
    assert rows <= fbgemm_rows(rows) <= rows + 2
    assert fbgemm_rows(fbgemm_rows(rows)) == fbgemm_rows(rows)


@fbgemm
def test_no_row_is_added_where_rows_need_not_be_blind() -> None:
    weight = noise(70, 250).bfloat16()
    quick, blind = (
        HalfLinear(weight, None, weight.dtype, each) for each in (FAST, KernelSettings())
    )
    assert [quick.computed_rows(rows) for rows in range(1, MOST)] == [*range(1, MOST)]
    assert blind.computed_rows(1) == 3
    x = noise(7, 250, seed=1).bfloat16()
    torch.testing.assert_close(quick(x), blind(x))


@fbgemm
def test_in_long_strips_rows_are_blind_to_each_other() -> None:
    weight, x = noise(70, 250).bfloat16(), noise(MOST, 250, seed=1).bfloat16()
    linear = HalfLinear(weight, noise(70, seed=2).bfloat16(), torch.bfloat16, KernelSettings())
    whole = linear(x)
    for count in range(1, MOST):
        assert torch.equal(linear(x[:count]), whole[:count])
        assert torch.equal(linear(x[-count:]), whole[-count:])
        assert torch.equal(linear(x[None, :count])[0], whole[:count])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scale", [1e-30, 0.02, 1e30])
def test_products_are_float32s_rounded_once(scale: float, bias: bool) -> None:
    weight, x = (noise(48, 300) * scale).bfloat16(), noise(9, 300, seed=1).bfloat16()
    added = (noise(48, seed=2) * scale).bfloat16() if bias else None
    want = x.double() @ weight.double().T + (added.double() if added is not None else 0)
    for linear in layers(weight, added):
        got = linear(x)
        assert got.dtype == torch.bfloat16
        # Half a unit in the last of 8 bits, and some room for sums that nearly cancel.
        assert torch.allclose(got.double(), want, rtol=2**-8, atol=scale * 1e-4)


@fbgemm
@given(st.lists(st.floats(width=16, allow_nan=False, allow_infinity=False), min_size=3, max_size=9))
@example([0.0, 0.0, 0.0])
@example([65504.0, 2.0**-14, 1.0])
def test_weights_are_kept(values: list[float]) -> None:
    # The identity asks for one weight at a time.
    weight = torch.tensor([values]).bfloat16()
    largest = float(weight.abs().max())
    got = HalfLinear(weight, None, torch.bfloat16, KernelSettings())(
        torch.eye(len(values)).bfloat16()
    )[:, 0]
    for kept, wanted in zip(got.tolist(), weight[0].tolist(), strict=True):
        if abs(wanted) >= largest * 2.0**-32:
            assert kept == wanted
        else:
            assert abs(kept - wanted) <= largest * 2.0**-40


@fbgemm
@pytest.mark.parametrize("writes", [True, False], ids=["in place", "copied"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_are_written_as_they_are_returned(
    dtype: torch.dtype, writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_precision, "_PACK_SLICE", 1 << 10)
    layer = HalfLinear(noise(80, 24).to(dtype), None, torch.float32, KernelSettings())
    assert [part.height for part in layer.slices] == [42, 38]
    x = noise(5, 24)
    for part in layer.slices:
        part._writes &= writes
        out = torch.full((5, part.height), torch.nan)
        part.write(x, out)
        assert torch.equal(out, part(x))


def test_slices_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = noise(300, 96).bfloat16(), noise(4, 96, seed=1).bfloat16()
    whole = [linear(x) for linear in layers(weight, None)]
    monkeypatch.setattr(half_precision, "_PACK_SLICE", 96 * 128)
    monkeypatch.setattr(half_precision, "_UPCAST_SLICE", 96 * 128)
    for got, want in zip(layers(weight, None), whole, strict=True):
        assert torch.allclose(got(x).float(), want.float(), rtol=2**-7, atol=1e-2)


def test_dots_are_float32s(old_cpu: Callable[[bool], None]) -> None:
    old_cpu(True)
    query, keys = noise(2, 8, 64).bfloat16(), noise(2, 1216, 64, seed=1).bfloat16()
    got = query_key_products(query, keys)
    assert got.dtype == torch.float32
    want = query.double() @ keys.double().transpose(1, 2)
    assert torch.allclose(got.double(), want, atol=1e-4)


@fbgemm
@given(st.lists(st.floats(width=16, allow_nan=False, allow_infinity=False), min_size=3, max_size=9))
@example([65504.0, 2.0**-24, -(2.0**-14)])
def test_float16_weights_are_kept_whole(values: list[float]) -> None:
    weight = torch.tensor([values]).half()
    got = HalfLinear(weight, None, torch.float32, KernelSettings())(torch.eye(len(values)))[:, 0]
    assert got.tolist() == weight[0].tolist()


@pytest.mark.sampled(4)
@fbgemm
@pytest.mark.parametrize("family", ["llama", "llama-tied", "llama-odd", "gemma2"])
def test_float16_checkpoints_are_half_as_large_and_say_the_same(
    family: str, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "SMALL_LAYER", 0)
    path = tiny(family, dtype=torch.float16)
    checkpoint = open_checkpoint(path)
    random = Random(family)
    prompt = [random.randrange(3, 150) for _ in range(70)]
    want = generated(path, prompt, NEW)
    for count in (1, 2):
        for mode in ("exact", "fast"):
            stages = cut(checkpoint, count, mode=mode)
            assert decode(stages, prompt, NEW) == want
            edges = [stage.shard.layers for stage in stages]
            for stage, span in zip(stages, edges, strict=True):
                ends = (span.start, span.stop)
                foretold = footprint(path, checkpoint.info, ends, "auto", mode)
                assert stage.shard.weight_bytes == pytest.approx(foretold.weights, rel=0.02)
    assert stages[0].shard.describe() == "float16"


@fbgemm
@pytest.mark.parametrize("family", ["llama", "llama-odd"])
def test_trees_of_float16_checkpoints_have_the_bits_of_the_sequence(
    family: str, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "SMALL_LAYER", 0)
    same_bits(cut(open_checkpoint(tiny(family, dtype=torch.float16)), 2), family)


@pytest.mark.parametrize("half", WAYS)
def test_which_product_is_used(half: bool, old_cpu: Callable[[bool], None]) -> None:
    old_cpu(half)
    weight = noise(24, 16)
    wide = MlasLinear if ort.prefers_mlas() else PackedLinear
    assert type(dense_linear(weight, None, KernelSettings(), weight.dtype)) is wide
    used = dense_linear(weight.bfloat16(), None, KernelSettings(), torch.bfloat16)
    assert type(used) is (HalfLinear if half else UpcastLinear)
    assert used.weight_bytes == 24 * 16 * 2
    shared = dense_linear(weight.bfloat16(), None, KernelSettings(), torch.bfloat16, shared=True)
    assert type(shared) is UpcastLinear
    assert shared.weight_bytes == 0


def test_nan_stays_nan(old_cpu: Callable[[bool], None]) -> None:
    old_cpu(True)
    weight = torch.tensor([[torch.inf, 1.0], [torch.nan, 1.0], [2.0, 1.0]]).bfloat16()
    got = dense_linear(weight, None, KernelSettings(), weight.dtype)(torch.ones(3, 2).bfloat16())
    assert got[0].isfinite().tolist() == [False, False, True]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("half", WAYS)
@pytest.mark.parametrize("family", ["llama", "llama-tied", "llama-odd", "gemma2", "qwen2-window"])
def test_tree_has_the_bits_of_the_sequence(
    family: str, half: bool, tiny: Callable[..., Path], old_cpu: Callable[[bool], None]
) -> None:
    old_cpu(half)
    same_bits(cut(open_checkpoint(tiny(family)), 2, dtype="bfloat16"), family)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_fast_mode(family: str, tiny: Callable[..., Path], old_cpu: Callable[[bool], None]) -> None:
    """Its logits are those of exact mode, but for rounding."""
    old_cpu(True)
    checkpoint = open_checkpoint(tiny(family))

    def logits(stages: list[HFStage]) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        shard = stages[-1].shard
        inner = shard.logits

        def watched(*args: Any) -> torch.Tensor:
            seen.append(inner(*args))
            return seen[-1]

        shard.logits = watched  # type: ignore[method-assign, assignment]
        sequential(stages, list(range(3, 83)), 70)
        return torch.cat(seen).float()

    exact = logits(cut(checkpoint, 2, dtype="bfloat16"))
    fast = logits(cut(checkpoint, 2, dtype="bfloat16", mode="fast"))
    assert torch.allclose(fast, exact, atol=0.05 * float(exact.abs().max()))
