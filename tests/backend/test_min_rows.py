"""Products that are filled up to a few rows where that is faster: same bits, large stages only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.backend.base import DType, Mode, Quantize
from asyncspec.plugins.hf.checkpoint.checkpoint import Checkpoint, open_checkpoint
from asyncspec.plugins.hf.kernels.cpu import dense
from asyncspec.plugins.hf.kernels.cpu.capabilities import (
    KernelSettings,
    can_pack,
    multiplies_bfloat16,
)
from asyncspec.plugins.hf.kernels.cpu.dense import (
    MAX_TIME_SHARE,
    TUNED_MIN_ROWS,
    is_faster,
    tune_min_rows,
)
from asyncspec.plugins.hf.kernels.cpu.linear import PackedLinear, RowwiseLinear
from asyncspec.plugins.hf.kernels.probing import noise
from asyncspec.plugins.hf.model.stage import HFStage
from backend.probe import cut, same_bits

pytestmark = pytest.mark.torch


@pytest.fixture
def checkpoint(tiny: Callable[..., Path]) -> Checkpoint:
    return open_checkpoint(tiny("llama-odd"))


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's product on any CPU that has it, and no stage too small to be tried."""
    if not can_pack():
        pytest.skip("oneDNN's product is not here")
    monkeypatch.setattr(dense, "prefers_mlas", lambda: False)
    monkeypatch.setattr(dense, "MIN_BYTES", 0)


def floors(stages: list[HFStage]) -> set[int]:
    return {linear.min_rows for stage in stages for linear in stage.shard.linears}


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_filled_up_passes_have_the_same_bits(
    dtype: DType, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == "bfloat16" and not multiplies_bfloat16():
        pytest.skip("this CPU does not multiply bfloat16")
    monkeypatch.setattr(dense, "is_faster", lambda linears, floor: True)
    filled = cut(checkpoint, 2, dtype=dtype)
    monkeypatch.setattr(dense, "is_faster", lambda linears, floor: False)
    own = cut(checkpoint, 2, dtype=dtype)
    assert (floors(filled), floors(own)) == ({TUNED_MIN_ROWS}, {PackedLinear.min_tested_rows})
    same_bits(filled, "filled")
    for one, other in zip(filled, own, strict=True):
        for linear, same in zip(one.shard.linears, other.shard.linears, strict=True):
            x = noise(1, linear.in_features).to(linear.dtype)
            assert torch.equal(linear(x), same(x))


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_only_allowed_row_floors_are_timed(
    mode: Mode, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing below a stage's own floor is tried, and no timing makes one lower."""
    asked: list[int] = []

    def quick(linears: list[RowwiseLinear], floor: int) -> bool:
        asked.append(floor)
        return False

    monkeypatch.setattr(dense, "is_faster", quick)
    stages = cut(checkpoint, 1, mode=mode)
    assert asked == [1 if mode == "fast" else 2]
    assert floors(stages) == set(asked)


def test_a_small_stage_is_not_tuned(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "prefers_mlas", lambda: False)
    monkeypatch.setattr(dense, "is_faster", lambda linears, floor: True)
    assert floors(cut(checkpoint, 1)) == {PackedLinear.min_tested_rows}


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_other_products_are_left_alone(
    quantize: Quantize, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "is_faster", lambda linears, floor: True)
    for stage in cut(checkpoint, 1, quantize=quantize):
        for linear in stage.shard.linears:
            assert (linear.min_rows == TUNED_MIN_ROWS) == (type(linear) is PackedLinear)


def test_a_higher_row_floor_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "MIN_BYTES", 0)
    monkeypatch.setattr(dense, "is_faster", lambda linears, floor: True)
    linear = PackedLinear(noise(8, 16), None, KernelSettings(min_rows=16))
    tune_min_rows([linear])
    assert linear.min_rows == 16


@given(st.lists(st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)), min_size=3, max_size=3))
def test_the_least_times_decide(times: list[tuple[float, float]]) -> None:
    taken = iter([seconds for both in times for seconds in both])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "_seconds", lambda linears, rows: next(taken))
        own, filled = (min(column) for column in zip(*times, strict=True))
        assert is_faster([], 1) == (filled < MAX_TIME_SHARE * own)
