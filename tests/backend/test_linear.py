"""Linear layers: rows are blind to each other, and few numbers of rows are ever computed on."""

from __future__ import annotations

import pytest
import torch

from asyncspec.plugins.hf.kernels.cpu.capabilities import KernelSettings
from asyncspec.plugins.hf.kernels.cpu.dense import dense_linear
from asyncspec.plugins.hf.kernels.cpu.linear import (
    ROUNDING_STEP,
    UNROUNDED_ROWS,
    PackedLinear,
    rounded_rows,
)
from asyncspec.plugins.hf.kernels.probing import noise

pytestmark = pytest.mark.torch

MOST = 300


def test_few_numbers_of_rows_are_computed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = PackedLinear(torch.randn(24, 16), torch.randn(24), KernelSettings())
    x = torch.randn(MOST, 16)
    whole, met = linear(x), set()
    product = linear.product

    def watched(rows: torch.Tensor) -> torch.Tensor:
        met.add(len(rows))
        return product(rows)

    monkeypatch.setattr(linear, "product", watched)
    for count in range(1, MOST + 1):
        assert torch.equal(linear(x[:count]), whole[:count])
        assert torch.equal(linear(x[None, -count:])[0], whole[-count:])
    assert len(met) <= UNROUNDED_ROWS + MOST // ROUNDING_STEP


def test_rounded_row_counts_hold_all_rows() -> None:
    for count in range(1, MOST):
        assert count <= rounded_rows(count) < count + ROUNDING_STEP
        assert rounded_rows(rounded_rows(count)) == rounded_rows(count)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shape", [(896, 4864), (5632, 1024), (33, 4100)])
def test_bfloat16_rows_do_not_depend_on_many_others(shape: tuple[int, int], shared: bool) -> None:
    """Wide enough that tiles add up a row's terms another way where there are more than 32 rows."""
    weight = noise(*shape).bfloat16()
    linear = dense_linear(weight, None, KernelSettings(), torch.bfloat16, shared=shared)
    x = noise(MOST, shape[1], seed=1).bfloat16()
    alone = torch.cat([linear(row[None]) for row in x[:8]])
    for count in (8, 16, 31, 32, 33, 36, 37, 48, 64, 65, 96, 160, MOST):
        assert torch.equal(linear(x[:count])[:8], alone)
        # Others come first.
        assert torch.equal(linear(x[:count].flip(0))[-8:], alone.flip(0))
