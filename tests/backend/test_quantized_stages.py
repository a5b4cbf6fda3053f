"""Quantised targets: a pipeline has the bits of its own quantised single-device reference."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from asyncspec.backend.base import LoadedSource, Quantize
from asyncspec.backend.reference import decode
from asyncspec.core.errors import UserError
from asyncspec.plugins.hf.checkpoint.checkpoint import Checkpoint, open_checkpoint
from asyncspec.plugins.hf.checkpoint.model_config import inspect_checkpoint
from asyncspec.plugins.hf.checkpoint.packed import PackedMatrix, quantize
from asyncspec.plugins.hf.heads.draft_model import load_draft
from asyncspec.plugins.hf.kernels.cpu import nbits
from asyncspec.plugins.hf.kernels.cpu.nbits import (
    NBitsLinear,
    block_of,
    multiplies_levels,
    uses_levels,
)
from asyncspec.plugins.hf.kernels.cpu.ort import Graph
from asyncspec.plugins.hf.kernels.cpu.quantized import (
    Int4Linear,
    Int8Linear,
    PackedInt4Linear,
    group_of,
    quantize_int4,
    quantize_int8,
)
from asyncspec.plugins.hf.model.footprint import footprint
from asyncspec.plugins.hf.model.optimized.graphs import FusedLayer
from asyncspec.plugins.hf.model.optimized.layers import OptimizedLayer
from asyncspec.plugins.hf.model.stage import HFStage, load_stage
from asyncspec.plugins.hf.model.weights import BITS, quantization_of
from asyncspec.testing.pipeline import Walk, sequential
from backend import predictable_models
from backend.fake_attention import Mixing
from backend.hf_cluster import Loaded
from backend.matrix import DRAWS, Cell, Matrix
from backend.probe import Probe, cut
from backend.tiny import save_tiny
from effort import NIGHTLY, QUIET, examples

pytestmark = pytest.mark.torch

KINDS: list[Quantize] = ["int8", "int4"]
DTYPES = ["float32", "bfloat16"]
FAMILIES = ["llama-odd", "llama-tied", "gemma2", "qwen2", "phi3", "qwen3-moe-mixed"]
STAGES = (1, 2, 4)
VOCAB = 150
MakeTiny = Callable[..., Path]
HERE = pytest.mark.skipif(not multiplies_levels(), reason="without onnxruntime's products")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype"), [*(product(KINDS, DTYPES) if NIGHTLY else zip(KINDS, DTYPES, strict=True))]
)
def test_a_cluster_writes_what_one_quantised_device_writes(
    kind: Quantize, dtype: str, tmp_path: Path
) -> None:
    """Whole clusters in the simulator, under random delays: text, and the bits it is drawn from."""
    target = predictable_models.save_target(tmp_path / "target")
    draft = load_draft(open_checkpoint(predictable_models.save_draft(tmp_path / "draft", target)))
    loaded = Loaded(open_checkpoint(target), dtype, kind)
    matrix = Matrix(loaded, {"draft": LoadedSource(draft)})
    for i, policy in enumerate(("flowspec", "pipedec", "chain")):
        for j, stages in enumerate(STAGES):
            matrix.run(Cell(policy, "draft", [*DRAWS][(i + j) % len(DRAWS)], stages))
    assert matrix.happened["draft", "hits"] > 0
    assert matrix.happened["draft", "misses"] > 0


@settings(
    max_examples=examples(12, quick=8),
    deadline=None,
    suppress_health_check=[*QUIET, HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 2**32),
    family=st.sampled_from(FAMILIES),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    prompt=st.integers(1, 100),
    length=st.integers(1, 30),
)
def test_any_model_any_tree_any_cut(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    family: str,
    kind: Quantize,
    dtype: str,
    prompt: int,
    length: int,
) -> None:
    checkpoint = open_checkpoint(save_tiny(tmp_path_factory.mktemp("model"), family, seed))
    random = Random(seed)
    tokens = [random.randrange(VOCAB) for _ in range(prompt + length)]
    alone: dict[int, torch.Tensor] = {}
    for stages in STAGES:
        pipeline = cut(checkpoint, stages, dtype=dtype, quantize=kind)
        assert {stage.guarantee for stage in pipeline} == {"bitwise"}
        probe = Probe(pipeline)
        if not alone:
            drawn = sequential(pipeline, tokens, prompt)
            alone = probe.take()
        walk = Walk(tokens, prompt, VOCAB, random, watch=probe.watch)
        assert walk.run(pipeline) == drawn
        assert probe.different(alone) == []


def test_no_row_is_doubled(tiny: MakeTiny) -> None:
    for kind in KINDS:
        (stage,) = cut(open_checkpoint(tiny("llama-odd")), 1, quantize=kind)
        assert {x.min_rows for x in stage.shard.linears} == {1}


@pytest.mark.parametrize("kind", KINDS)
def test_products_that_see_other_rows_are_found(
    kind: Quantize, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = NBitsLinear._multiply

    def sees(self: NBitsLinear, x: torch.Tensor) -> torch.Tensor:
        # As a matrix-vector kernel for few rows would.
        return product(self, x) * (1 + 1e-5 * (x.numel() < 4 * self.in_features))

    with monkeypatch.context() as patch:
        patch.setattr(NBitsLinear, "_multiply", sees)
        (stage,) = cut(open_checkpoint(tiny("llama")), 1, quantize=kind)
    head = stage.shard.model.lm_head
    assert type(head) is (NBitsLinear if multiplies_levels() else Int8Linear)
    assert head.min_rows == (4 if multiplies_levels() else 1)
    assert stage.guarantee == "bitwise"


@HERE
def test_wrong_products_are_not_used(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """As onnxruntime's of one row of asymmetric levels with AVX2 alone."""
    block_product = Graph.block_product

    def wrong(self: Graph, x: str, packed: PackedMatrix, bias: torch.Tensor | None = None) -> str:
        if packed.zero_points is not None:
            packed = replace(packed, zero_points=packed.zero_points // 2)
        return block_product(self, x, packed, bias)

    (want,) = cut(open_checkpoint(tiny("llama")), 1, quantize="int4")
    monkeypatch.setattr(Graph, "block_product", wrong)
    (stage,) = cut(open_checkpoint(tiny("llama")), 1, quantize="int4")
    assert {type(layer) for layer in want.shard.model.model.layers} == {FusedLayer}
    assert {type(layer) for layer in stage.shard.model.model.layers} == {OptimizedLayer}
    kinds = {type(x) for x in stage.shard.linears if x is not stage.shard.model.lm_head}
    assert kinds <= {PackedInt4Linear, Int4Linear}
    inputs, positions = want.shard.probe_inputs(5), torch.arange(5)
    with torch.inference_mode():
        got, same = (x.shard.hidden(inputs, positions, Mixing(len(inputs))) for x in (stage, want))
    assert (got - same).norm() < 0.05 * same.norm()


def dequantised(checkpoint: Checkpoint, kind: Quantize) -> Any:
    """transformers' own model with each linear weight replaced by what its numbers stand for."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32)
    head = torch.nn.Parameter(model.lm_head.weight.clone())
    model.config.tie_word_embeddings = False
    model.lm_head.weight = head
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            how = quantization_of(name, kind)
            module.weight.copy_(stands_for(name, module.weight.detach(), how))
        elif name.endswith("experts"):
            for stack in (module.gate_up_proj, module.down_proj):
                for weight in stack:
                    weight.copy_(stands_for(f"{name}.0", weight, kind))
    return model


def stands_for(name: str, weight: torch.Tensor, kind: Quantize) -> torch.Tensor:
    """What a matrix's numbers are once it is quantised."""
    if uses_levels(name):
        block = block_of(weight.shape[1])
        shape = tuple(weight.shape)
        return quantize(lambda a, b: weight[a:b], shape, BITS[kind], block).dequantized()
    if kind == "int8":
        whole, scales = quantize_int8(weight)
        return whole.float() * scales.float()[:, None]
    group = group_of(weight.shape[1])
    wide = torch.nn.functional.pad(weight, (0, -weight.shape[1] % group))
    levels, steps = quantize_int4(wide, group)
    scale, offset = (x.float().T.repeat_interleave(group, 1) for x in steps.unbind(-1))
    return ((levels - 8) * scale + offset)[:, : weight.shape[1]]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_model_with_rounded_weights(family: str, kind: Quantize, tiny: MakeTiny) -> None:
    """Against transformers: what differs is the rounding of activations to int8 or bfloat16."""
    checkpoint = open_checkpoint(tiny(family))
    random = Random(family)
    tokens = [random.randrange(3, VOCAB) for _ in range(40)]
    with torch.inference_mode():
        want = dequantised(checkpoint, kind)(torch.tensor([tokens])).logits[0]
    pipeline = cut(checkpoint, 2, quantize=kind)
    probe = Probe(pipeline)
    sequential(pipeline, tokens, 8)
    for position, logits in probe.take().items():
        off = (logits - want[position]).norm() / want[position].norm()
        assert off < (0.15 if multiplies_levels() else 0.04), position


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("kind", "dtype"), [*zip(KINDS, DTYPES, strict=True)])
def test_memory_is_as_predicted(family: str, kind: Quantize, dtype: str, tiny: MakeTiny) -> None:
    path = tiny(family)
    checkpoint = open_checkpoint(path)
    layers = checkpoint.info.layers
    for span in ((0, 2), (2, layers), (0, layers)):
        foretold = footprint(path, inspect_checkpoint(path), span, dtype, "exact", kind)
        stage = load_stage(checkpoint, *span, dtype=dtype, quantize=kind)
        # Norms of fused layers are float32 numbers.
        assert stage.shard.weight_bytes == pytest.approx(foretold.weights, rel=0.02)


def test_memory_without_onnxruntime_is_as_predicted(
    tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nbits, "multiplies_levels", lambda: False)
    path = tiny("llama-odd")
    for kind in KINDS:
        foretold = footprint(path, inspect_checkpoint(path), (0, 5), "bfloat16", "exact", kind)
        stage = load_stage(open_checkpoint(path), 0, 5, dtype="bfloat16", quantize=kind)
        assert stage.guarantee == "bitwise"
        assert stage.shard.weight_bytes == foretold.weights


def test_each_dtype_and_kind_says_how_it_keeps_its_weights(
    tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def words(quantize: Quantize, first: int, last: int) -> str:
        checkpoint = open_checkpoint(tiny("llama-odd"))
        return load_stage(checkpoint, first, last, quantize=quantize).shard.describe()

    assert words("none", 0, 5) == "float32"
    if multiplies_levels():
        assert words("int8", 0, 5) == "int8 in blocks of 32"
        assert words("int4", 4, 5) == "int4 in blocks of 32, head int8 in blocks of 32"
    monkeypatch.setattr(nbits, "multiplies_levels", lambda: False)
    assert words("int8", 0, 5) == "int8"
    assert words("int4", 0, 2) == "int4 in groups of 32 and int4 in groups of 64"
    assert words("int4", 4, 5).endswith(", head int8")


def test_routers_keep_their_bits(tiny: MakeTiny) -> None:
    (stage,) = cut(open_checkpoint(tiny("qwen3-moe")), 1, quantize="int4")
    assert "float32" in stage.shard.describe()
    assert {x.description for x in stage.shard.linears if x.out_features == 8} == {"float32"}


def test_quantised_is_another_model(tiny: MakeTiny) -> None:
    """The tests above would pass on a stage that quantises nothing."""

    def logits(quantize: Quantize) -> torch.Tensor:
        pipeline = cut(open_checkpoint(tiny("llama")), 1, quantize=quantize)
        probe = Probe(pipeline)
        decode(pipeline, list(range(3, 20)), 1)
        return probe.take()[16]

    found = [logits(quantize) for quantize in get_args(Quantize)]
    assert not any(torch.equal(a, b) for a in found for b in found if a is not b)


def test_a_torch_without_the_products(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_weight_int4pack_mm_for_cpu")
    checkpoint = open_checkpoint(tiny("llama"))
    with pytest.raises(UserError, match="which int4 weights need; use unquantised ones"):
        load_stage(checkpoint, 0, 1, quantize="int4")
    assert isinstance(load_stage(checkpoint, 0, 1, quantize="int8"), HFStage)
