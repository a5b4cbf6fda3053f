"""The start-up self-test: what it finds here, and what happens where kernels are worse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch

from asyncspec.plugins.hf.checkpoint.checkpoint import Checkpoint, open_checkpoint
from asyncspec.plugins.hf.kernels.cpu import dense, linear, ort
from asyncspec.plugins.hf.kernels.cpu.capabilities import KernelSettings
from asyncspec.plugins.hf.kernels.cpu.linear import PackedLinear, RowwiseLinear
from asyncspec.plugins.hf.kernels.cpu.ort import MlasLinear
from asyncspec.plugins.hf.model import self_test, shard
from asyncspec.plugins.hf.model.optimized.graphs import PostAttentionGraph, PreAttentionGraph
from asyncspec.plugins.hf.model.stage import HFStage
from asyncspec.testing.pipeline import Walk, sequential
from backend.probe import Probe, cut

pytestmark = pytest.mark.torch

VOCAB = 150


@pytest.fixture
def checkpoint(tiny: Callable[..., Path]) -> Checkpoint:
    return open_checkpoint(tiny("llama-odd"))


@pytest.fixture(
    params=[
        PackedLinear,
        pytest.param(
            MlasLinear,
            marks=pytest.mark.skipif(not ort.prefers_mlas(), reason="not this CPU's product"),
        ),
    ]
)
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[RowwiseLinear]:
    """Of float32 weights on any CPU, and on those that have a is_faster one that."""
    chosen: type[RowwiseLinear] = request.param
    monkeypatch.setattr(dense, "prefers_mlas", lambda: chosen is MlasLinear)
    return chosen


def differing(stages: list[HFStage]) -> int:
    random = Random(0)
    tokens = [random.randrange(VOCAB) for _ in range(120)]
    probe = Probe(stages)
    sequential(stages, tokens, 80)
    alone = probe.take()
    Walk(tokens, 80, VOCAB, random, watch=probe.watch).run(stages)
    return len(probe.different(alone))


def test_the_self_test_passes_here(checkpoint: Checkpoint, product: type[RowwiseLinear]) -> None:
    (stage,) = cut(checkpoint, 1)
    assert stage.guarantee == "bitwise"
    # One row is doubled for oneDNN alone. What attention's products can do depends on the CPU.
    found = stage.settings
    assert found == KernelSettings(
        found.max_k, found.row_tiles, product.min_tested_rows, block_rows=found.block_rows
    )
    # Layers are graphs where onnxruntime multiplies, and the head is by itself.
    graphs = {PreAttentionGraph, PostAttentionGraph} if product is MlasLinear else set()
    assert {type(x) for x in stage.shard.linears} == {product, *graphs}
    assert {x.min_rows for x in stage.shard.linears} == {product.min_tested_rows}


def test_fast_mode_promises_nothing(checkpoint: Checkpoint) -> None:
    stages = cut(checkpoint, 1, mode="fast")
    assert stages[0].guarantee == "tolerance"
    assert differing(stages) > 0


def test_without_the_private_operators(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "prefers_mlas", lambda: False)
    monkeypatch.setattr(linear, "can_pack", lambda: False)
    stages = cut(checkpoint, 2)
    packed = [x for stage in stages for x in stage.shard.linears if isinstance(x, PackedLinear)]
    assert packed
    assert not any(x.packed for x in packed)
    # torch's own product needs more rows before it settles; whatever it is, what is said holds.
    assert all(stage.settings.min_rows >= 2 for stage in stages)
    if all(stage.guarantee == "bitwise" for stage in stages):
        assert differing(stages) == 0


def test_without_chains_every_tail_is_gathered(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "_ignores_zeros", lambda *_: False)
    stages = cut(checkpoint, 2)
    assert [stage.settings.max_k for stage in stages] == [0, 0]
    assert [stage.guarantee for stage in stages] == ["bitwise"] * 2
    assert differing(stages) == 0


def test_shorter_chains_are_found(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = cut(checkpoint, 1)
    blind = self_test._ignores_zeros
    monkeypatch.setattr(
        self_test,
        "_ignores_zeros",
        lambda shape, rows, k, *more: k <= 128 and blind(shape, rows, k, *more),
    )
    (stage,) = cut(checkpoint, 1)
    assert stage.settings.max_k == min(128, whole.settings.max_k)


def test_products_that_see_other_rows(
    checkpoint: Checkpoint, product: type[RowwiseLinear], monkeypatch: pytest.MonkeyPatch
) -> None:
    blind = product.product

    def sees(self: RowwiseLinear, x: torch.Tensor) -> torch.Tensor:
        return blind(self, x) * (1 + 1e-6 * x.numel())

    monkeypatch.setattr(product, "product", sees)
    (stage,) = cut(checkpoint, 1)
    assert stage.guarantee == "tolerance"
    assert stage.settings.min_rows == 16


def test_ragged_vectors_are_noticed(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where some CPU's vectors need no padding this could pass either way, but never lie."""
    monkeypatch.setattr(shard, "pad_elementwise", lambda _: None)
    stages = cut(checkpoint, 1)
    if stages[0].guarantee == "bitwise":
        assert differing(stages) == 0
