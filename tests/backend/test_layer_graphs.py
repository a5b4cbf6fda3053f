"""Layers as graphs: every dense family's are, with the family's numbers and bits of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.kernels.cpu import capabilities, dense, ort
from asyncspec.plugins.hf.kernels.cpu.capabilities import KernelSettings
from asyncspec.plugins.hf.kernels.cpu.elementwise import PaddedActivation
from asyncspec.plugins.hf.kernels.cpu.ort import MlasLinear, MmapLinear
from asyncspec.plugins.hf.kernels.probing import noise
from asyncspec.plugins.hf.model import shard as shards
from asyncspec.plugins.hf.model.footprint import footprint
from asyncspec.plugins.hf.model.optimized import graphs
from asyncspec.plugins.hf.model.optimized.graphs import FusedLayer, close, known_activation
from asyncspec.plugins.hf.model.optimized.layers import OptimizedLayer
from asyncspec.plugins.hf.model.shard import Shard, load_shard
from asyncspec.plugins.hf.model.stage import load_stage
from asyncspec.plugins.hf.model.weights import read_shard_tensors
from backend.fake_attention import Mixing
from backend.tiny import FAMILIES, OWN_CODE

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.torch

MakeTiny = Callable[..., Path]
FIRST, LAST = 1, 4
WITH_EXPERTS = {"mixtral", "olmoe", "qwen3-moe"}
HERE = pytest.mark.skipif(not ort.prefers_mlas(), reason="not this CPU's product")


@pytest.fixture(autouse=True)
def on_such_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "prefers_mlas", lambda: True)


def load(path: Path, first: int = FIRST, last: int = LAST) -> Shard:
    with torch.inference_mode():
        checkpoint = open_checkpoint(path)
        return load_shard(checkpoint, first, last, torch.float32, "exact", KernelSettings())


def load_without_graphs(
    path: Path, patch: pytest.MonkeyPatch, first: int = FIRST, last: int = LAST
) -> Shard:
    with patch.context() as patched:
        patched.setattr(shards, "fuse_layers", lambda *_: None)
        return load(path, first, last)


def outputs(shard: Shard, rows: slice) -> torch.Tensor:
    positions = torch.arange(40) // 2 + 7
    with torch.inference_mode():
        taken = shard.probe_inputs(40)[rows]
        return shard.hidden(taken, positions[rows], Mixing(len(taken)))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in OWN_CODE])
def test_every_dense_layer_is_fused_and_keeps_its_numbers(
    family: str, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused, without_graphs = load(tiny(family)), load_without_graphs(tiny(family), monkeypatch)
    kinds = [type(layer) for layer in fused.model.model.layers]
    if not ort.prefers_mlas():
        pass  # graphs are for CPUs that were tried
    elif family in WITH_EXPERTS:
        assert kinds == [OptimizedLayer] * 3
    elif family == "qwen3-moe-mixed":
        assert kinds == [OptimizedLayer, FusedLayer, FusedLayer]
    else:
        assert kinds == [FusedLayer] * 3
    assert fused.weight_bytes == without_graphs.weight_bytes
    assert fused.describe() == without_graphs.describe()
    for rows in (slice(1), slice(5), slice(40)):
        got, want = outputs(fused, rows), outputs(without_graphs, rows)
        assert close(got, want, 1e-5)


@HERE
@pytest.mark.parametrize("family", ["llama-odd", "gemma3", "qwen3", "phi3"])
def test_rows_are_blind_to_each_other(family: str, tiny: MakeTiny) -> None:
    shard = load(tiny(family))
    positions = torch.arange(40)
    with torch.inference_mode():
        taken = shard.probe_inputs(40)
        whole = shard.hidden(taken, positions, Mixing(40))
        for count in (1, 2, 3, 7, 16, 33):
            one = shard.hidden(taken[:count], positions[:count], Mixing(count))
            assert torch.equal(one, whole[:count]), count


def test_a_loaded_shard_reads_no_more_of_its_files(tiny: MakeTiny) -> None:
    for family in ("llama", "mixtral"):
        shard = load(tiny(family), 0, 5)
        assert not [x for x in shard.model.modules() if isinstance(x, MmapLinear)]


@HERE
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_heads_may_be_turned_in_part(
    share: float, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Phi 4 mini."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}
    path = tiny("phi3", rope_parameters=rope, head_dim=32)
    fused, without_graphs = load(path), load_without_graphs(path, monkeypatch)
    assert {type(layer) for layer in fused.model.model.layers} == {FusedLayer}
    assert close(outputs(fused, slice(5)), outputs(without_graphs, slice(5)), 1e-5)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3-moe-mixed"])
def test_a_row_floor_of_the_head_pads_no_layer(family: str, tiny: MakeTiny) -> None:
    """A head of another kind than the layers has a floor of its own, for the rows it judges."""
    stage = load_stage(open_checkpoint(tiny(family, dtype=torch.float16)), 0, 5)
    shard, counts = stage.shard, []

    class Counting(Mixing):
        def attend(self, asked: Any, query: torch.Tensor, *rest: Any) -> torch.Tensor:
            counts.append(query.shape[1])
            return super().attend(asked, query, *rest)

    with torch.inference_mode():
        shard.logits(shard.probe_inputs(1), torch.tensor([7]), Counting(1), torch.tensor([0]))
    assert set(counts) == {1}


@pytest.mark.parametrize("least", [1, 4])
def test_graphs_get_the_row_floor_of_their_layers(least: int, tiny: MakeTiny) -> None:
    shard = load(tiny())
    want = outputs(shard, slice(2))
    for linear in shard.linears:
        linear.min_rows = least
    seen = []
    for layer in shard.model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    assert close(outputs(shard, slice(2)), want, 1e-5)
    assert set(seen) == {max(2, least)}


@pytest.mark.parametrize("spoilt", ["running", "numbers", "blindness", "activation", "graph"])
def test_layers_that_compute_something_else_get_no_graphs(
    spoilt: str, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another release of onnxruntime might."""
    want = load_without_graphs(tiny(), monkeypatch)
    forward = FusedLayer.forward

    def other(self: FusedLayer, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        out = forward(self, hidden, *rest)
        return out * (1.001 if spoilt == "numbers" else 1 + 2e-7 * hidden.shape[1])

    if spoilt == "activation":
        monkeypatch.setattr(graphs, "known_activation", lambda _: None)
    elif spoilt == "graph":
        monkeypatch.setattr(graphs, "known_activation", lambda _: "Nothing")
    elif spoilt == "running":
        monkeypatch.setattr(graphs, "_rotary", lambda graph, x, *_: graph.add("Add", x, "cos"))
    else:
        monkeypatch.setattr(FusedLayer, "forward", other)
    got = load(tiny())
    assert {type(layer) for layer in got.model.model.layers} == {OptimizedLayer}
    assert {type(linear) for linear in got.linears} == {MlasLinear}
    assert torch.equal(outputs(got, slice(5)), outputs(want, slice(5)))


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("silu", "QuickGelu"),
        ("gelu", "Gelu"),
        ("gelu_pytorch_tanh", "FastGelu"),
        ("gelu_new", "FastGelu"),
        ("relu2", None),
        ("tanh", None),
    ],
)
def test_activations_are_distinguished(name: str, operator: str | None) -> None:
    from transformers.activations import ACT2FN

    for function in (ACT2FN[name], PaddedActivation(ACT2FN[name])):
        assert known_activation(function) == operator


@given(height=st.integers(1, 40), width=st.integers(1, 40), biased=st.booleans())
def test_mapped_weights_are_those_of_the_file(
    height: int, width: int, biased: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from safetensors.torch import save_file

    from asyncspec.plugins.hf.checkpoint.files.headers import read_header

    path = tmp_path_factory.mktemp("mapped") / "model.safetensors"
    weight, bias = noise(height, width), noise(height, seed=1) if biased else None
    save_file({"before": noise(3), "weight": weight}, path)
    linear = MmapLinear(read_header(path)["weight"], bias)
    assert torch.equal(linear.weight, weight)
    x = noise(5, width, seed=2)
    # Where weights begin in memory makes a difference to torch's product, in the last bit.
    torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, weight, bias))


@HERE
@pytest.mark.parametrize("small", [True, False])
def test_small_layers_of_float16_are_fused_as_float32(
    small: bool, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny(dtype=torch.float16)
    exact = load(tiny_in_float32(path), 0, 5)
    largest = exact.linears[0].weight_bytes + exact.linears[1].weight_bytes
    monkeypatch.setattr(dense, "SMALL_LAYER", largest // 4 - (0 if small else largest // 8))
    shard = load(path, 0, 5)
    fused = isinstance(shard.model.model.layers[0], FusedLayer)
    assert fused is (small or not capabilities.reads_half())
    if small:
        assert torch.equal(outputs(shard, slice(5)), outputs(exact, slice(5)))
        assert shard.describe().startswith("float32, head float16")


@HERE
def test_which_layers_are_fused_is_no_matter_of_the_cut(
    tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a layer's bits were."""
    path = tiny("qwen3-moe-mixed", dtype=torch.float16, moe_intermediate_size=200)
    checkpoint = open_checkpoint(path)
    counts = read_shard_tensors(checkpoint, 0, 5, torch.float32).weight_counts().values()
    monkeypatch.setattr(dense, "SMALL_LAYER", min(counts))
    assert max(counts) > min(counts)
    whole = [type(layer) for layer in load(path, 0, 5).model.model.layers]
    alone = [type(load(path, i, i + 1).model.model.layers[0]) for i in range(5)]
    assert whole == alone
    assert set(whole) == {OptimizedLayer, FusedLayer}
    for span in ((0, 5), (1, 3)):
        foretold = footprint(path, checkpoint.info, span, "float32", "exact").weights
        assert load(path, *span).weight_bytes == pytest.approx(foretold, rel=0.02)


def tiny_in_float32(path: Path) -> Path:
    """The same numbers as a checkpoint of float16."""
    from transformers import AutoModelForCausalLM

    wide = path.with_name(f"{path.name}-wide")
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).save_pretrained(wide)
    return wide
