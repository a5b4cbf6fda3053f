"""Layers of float16 weights by numpy: the family's numbers, and bits that no neighbour changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import torch

from asyncspec.backend.tree_stage import Abandoned
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.kernels.cpu import capabilities, dense, half_precision
from asyncspec.plugins.hf.kernels.cpu.capabilities import KernelSettings
from asyncspec.plugins.hf.model import shard as shards
from asyncspec.plugins.hf.model.optimized.arrays import ArrayLayer
from asyncspec.plugins.hf.model.optimized.graphs import close
from asyncspec.plugins.hf.model.optimized.layers import OptimizedLayer
from asyncspec.plugins.hf.model.shard import Shard, load_shard
from asyncspec.plugins.hf.model.stage import capture_hidden_states
from asyncspec.testing.pipeline import Walk, sequential
from backend.fake_attention import Mixing
from backend.probe import Probe, cut

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not capabilities.reads_half(), reason="this torch has no FBGEMM"),
]

MakeTiny = Callable[..., Path]


@pytest.fixture(autouse=True)
def on_such_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "prefers_mlas", lambda: False)
    monkeypatch.setattr(half_precision, "_PACK_SLICE", 1 << 12)


def load(path: Path) -> Shard:
    with torch.inference_mode():
        return load_shard(open_checkpoint(path), 1, 4, torch.float32, "exact", KernelSettings())


def outputs(shard: Shard, rows: slice) -> torch.Tensor:
    positions = torch.arange(40) // 2 + 7
    with torch.inference_mode():
        taken = shard.probe_inputs(40)[rows]
        return shard.hidden(taken, positions[rows], Mixing(len(taken)))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "olmo2", "granite", "smollm3", "phi3"])
def test_numbers_are_the_familys_and_rows_are_blind(
    family: str, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny(family, dtype=torch.float16)
    shard = load(path)
    monkeypatch.setattr(shards, "fuse_layers", lambda *_: None)
    want = outputs(load(path), slice(40))
    assert {type(layer) for layer in shard.model.model.layers} == {ArrayLayer}
    for count in (1, 2, 3, 7, 33, 40):
        got = outputs(shard, slice(count))
        assert close(got, want[:count], 1e-5)
        assert torch.equal(got, outputs(shard, slice(40))[:count]), count


def test_a_pass_leaves_what_another_has_returned(tiny: MakeTiny) -> None:
    shard = load(tiny("qwen2", dtype=torch.float16))
    for count in (1, 3, 20):  # arrays are kept from pass to pass, and are not
        first = outputs(shard, slice(count))
        kept = first.clone()
        outputs(shard, slice(20, 20 + count))
        assert torch.equal(first, kept)


def test_a_pass_ends_between_the_parts_of_a_product(tiny: MakeTiny) -> None:
    shard = load(tiny("qwen2", dtype=torch.float16))
    want, given = outputs(shard, slice(3)), (shard.probe_inputs(3), torch.arange(3))

    def checks(last: int) -> int:
        """Of a pass that is abandoned at check ``last``."""
        tree, made = Mixing(3), itertools.count()
        tree.stop = lambda: next(made) == last
        with torch.inference_mode(), suppress(Abandoned):
            shard.hidden(*given, tree)
            assert last < 0
        return next(made)

    whole = checks(-1)
    assert whole > 4 * 2 * len(shard.model.model.layers)  # products of two parts and more
    for last in (0, whole // 2, whole - 1):
        assert checks(last) == last + 1
        assert torch.equal(outputs(shard, slice(3)), want)


def test_hidden_states_are_captured_at_every_depth(tiny: MakeTiny) -> None:
    with torch.inference_mode():
        path = open_checkpoint(tiny("qwen2", dtype=torch.float16))
        shard = load_shard(path, 0, 2, torch.float32, "exact", KernelSettings())
        tokens = shard.probe_inputs(3)
        given = (tokens, torch.arange(3))
        with capture_hidden_states(shard, (0, 1, 2)) as captured:
            got = shard.hidden(*given, Mixing(3))
        assert torch.equal(captured[0], shard.model.model.embed_tokens(tokens))
        assert torch.equal(captured[2], got)
        assert torch.equal(got, shard.hidden(*given, Mixing(3)))
        assert len({x.sum().item() for x in captured.values()}) == 3


def test_logits_are_those_of_the_familys_own_code(tiny: MakeTiny) -> None:
    for family, plain in (("qwen2", True), ("gemma2", False), ("granite", False)):
        with torch.inference_mode():
            path = open_checkpoint(tiny(family, dtype=torch.float16))
            last = path.info.layers
            shard = load_shard(path, 1, last, torch.float32, "exact", KernelSettings())
            assert shard.has_plain_head == plain
            rows, given = torch.tensor([0, 2]), (shard.probe_inputs(3), torch.arange(3))
            got = shard.logits(*given, Mixing(3), rows)
            shard.has_plain_head = False
            assert torch.equal(got, shard.logits(*given, Mixing(3), rows))


def test_layers_with_another_activation_stay(tiny: MakeTiny) -> None:
    shard = load(tiny("gemma2", dtype=torch.float16))
    assert {type(layer) for layer in shard.model.model.layers} == {OptimizedLayer}


def test_trees_have_the_bits_of_sequences(tiny: MakeTiny) -> None:
    """In passes of one row and of many, with the speculative region in one block and in more than
    a product's terms."""
    stages = cut(open_checkpoint(tiny("llama-odd", dtype=torch.float16)), 2, dtype="float32")
    assert [stage.guarantee for stage in stages] == ["bitwise"] * 2
    tokens = [Random(7).randrange(150) for _ in range(130)]
    for chances in ({"noise": 0.4, "prunes": 0.5}, {"noise": 0.85, "prunes": 0.02}):
        probe = Probe(stages)
        drawn = sequential(stages, tokens, 60)
        alone = probe.take()
        walk = Walk(tokens, 60, 150, Random(8), watch=probe.watch, **chances)
        assert walk.run(stages) == drawn
        assert probe.different(alone) == []
        probe.stop()
