"""Dense matrices of the same rows are kept as one, where they are of one form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.kernels.cpu import dense
from asyncspec.plugins.hf.kernels.cpu.capabilities import KernelSettings
from asyncspec.plugins.hf.kernels.cpu.linear import RowwiseLinear
from asyncspec.plugins.hf.kernels.cpu.stacked import WaitingDense, stack
from asyncspec.plugins.hf.kernels.probing import noise, same_up_to_rounding
from asyncspec.plugins.hf.model import shard as shards
from asyncspec.plugins.hf.model.shard import Shard, load_shard

pytestmark = pytest.mark.torch

WIDTH, HEIGHTS = 96, (64, 16, 16)


def waiting(
    dtype: torch.dtype, heights: tuple[int, ...] = HEIGHTS, width: int = WIDTH
) -> nn.ModuleList:
    """The second has a bias, the others have none."""
    return nn.ModuleList(
        WaitingDense(
            noise(height, width, seed=i).to(dtype),
            noise(height, seed=9).to(dtype) if i == 1 else None,
            KernelSettings(),
            dtype,
        )
        for i, height in enumerate(heights)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_stack_computes_what_its_parts_do(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "prefers_mlas", lambda: False)
    x = noise(1, 5, WIDTH, seed=3).to(dtype)
    want = torch.cat([part.forward(x) for part in waiting(dtype)], -1)
    (stacked,) = stack(waiting(dtype), HEIGHTS)
    assert isinstance(stacked, RowwiseLinear)
    assert same_up_to_rounding(stacked.forward(x), want)
    alone = torch.cat([part.pack().forward(x) for part in waiting(dtype)], -1)  # type: ignore[operator]
    assert same_up_to_rounding(alone, want)


def test_matrices_of_other_forms_stay() -> None:
    for parts, heights in (
        (waiting(torch.float32), (64, 32)),
        (nn.ModuleList([*waiting(torch.float32), *waiting(torch.bfloat16)]), HEIGHTS * 2),
        (nn.ModuleList([*waiting(torch.float32), *waiting(torch.float32, width=32)]), HEIGHTS * 2),
        (nn.ModuleList([nn.Linear(WIDTH, 64)]), (64,)),
    ):
        assert stack(parts, heights) is parts


def load(path: Path) -> Shard:
    with torch.inference_mode():
        return load_shard(open_checkpoint(path), 1, 3, torch.float32, "exact", KernelSettings())


def test_layers_that_keep_their_own_code_keep_their_matrices(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "prefers_mlas", lambda: False)
    stacked = load(tiny("qwen2"))
    monkeypatch.setattr(shards, "optimize_model", lambda *_: "results differ")
    apart = load(tiny("qwen2"))
    assert [len(each.linears) for each in (stacked, apart)] == [2 * 4, 2 * 7]
    assert not [x for each in (stacked, apart) for x in each.linears if type(x) is WaitingDense]
    assert stacked.weight_bytes == apart.weight_bytes
