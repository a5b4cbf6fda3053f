"""Devices: which one an option means, and the accelerator's path on an emulated and a fake one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core.errors import UserError
from asyncspec.core.jobs import Admit, Compact, Forward, Row, TensorRows
from asyncspec.core.sampling import Sampling
from asyncspec.plugins.hf.attention.attention import FastAttention
from asyncspec.plugins.hf.attention.cache import KVCache
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.checkpoint.packed import PackedMatrix, quantize
from asyncspec.plugins.hf.heads.eagle.checkpoint import open_eagle
from asyncspec.plugins.hf.heads.eagle.head import load_head
from asyncspec.plugins.hf.kernels import device
from asyncspec.plugins.hf.kernels.accelerator import int4, paths, quantized
from asyncspec.plugins.hf.kernels.accelerator.graphs import capture_emulated
from asyncspec.plugins.hf.kernels.accelerator.linear import EXACT_BUCKETS, padded
from asyncspec.plugins.hf.kernels.device import CPU, find
from asyncspec.plugins.hf.kernels.probing import noise
from asyncspec.plugins.hf.model.optimized.captured import CapturedLayer
from asyncspec.plugins.hf.model.stage import HFStage, cut_passes, load_stage
from asyncspec.testing import engines
from asyncspec_nodes.cluster.checkpoints import BUNDLED_EAGLE, BUNDLED_TARGET
from asyncspec_protocol.ids import SegmentId, SessionId
from backend.fake_device import FakeGpu, fake_mode, move
from backend.probe import cut, same_bits

pytestmark = pytest.mark.torch

EMULATED = find("emulated")

DEVICE = find(os.environ.get("ASYNCSPEC_TEST_DEVICE", "emulated"))
"""``python tools/check_device`` names those of a machine."""

DEVICES = [EMULATED, find("emulated-paths")] if DEVICE is EMULATED else [DEVICE]
"""Without and with a kernel for attention over paths."""

SESSION = SessionId(3)


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find("cpu") is CPU
    monkeypatch.setattr(device, "names", list)
    assert find("auto") is CPU
    for wanted in ("cuda", "cuda:0", "mps", "cuda:", "vulkan", "cpu:1"):
        with pytest.raises(UserError, match=f"device {wanted}: torch .* finds cpu; use one"):
            find(wanted)
    monkeypatch.setattr(device, "names", lambda: ["cuda:0", "cuda:1", "xpu:0", "mps"])
    monkeypatch.setattr(device, "_accelerator", lambda name: name)
    meant: dict[str, Any] = {
        "auto": "cuda:0",
        "CUDA": "cuda:0",
        "cuda1": "cuda:1",
        "CUDA:1": "cuda:1",
    }
    meant |= {"xpu": "xpu:0", "metal": "mps", "rocm": "cuda:0", "gpu": "cuda:0"}
    found: dict[str, object] = {wanted: find(wanted) for wanted in meant}
    assert found == meant
    with pytest.raises(UserError, match="finds cpu, cuda:0, cuda:1, xpu:0, mps"):
        find("cuda:2")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 8))
def test_parts_of_passes(counts: list[int], most: int) -> None:
    """All rows, in their order, in as few parts as there can be."""
    passes = [
        Forward(
            SessionId(i),
            SegmentId(0),
            0,
            tuple(Row(slot, slot, (slot,)) for slot in range(count)),
            tokens=tuple(range(count)),
            hidden=TensorRows(None, tuple(range(100, 100 + count))),
            sampled_rows=tuple(range(0, count, 2)),
        )
        for i, count in enumerate(counts)
    ]
    parts = cut_passes(passes, most)
    sizes = [sum(one.row_count for _, one in part) for part in parts]
    assert len(sizes) == -(-sum(counts) // most)
    assert max(sizes) <= most
    assert cut_passes(passes, None) == [[*enumerate(passes)]]
    for number, whole in enumerate(passes):
        own = [one for part in parts for i, one in part if i == number]
        assert sum((one.rows for one in own), ()) == whole.rows
        assert sum((one.tokens for one in own), ()) == whole.tokens
        assert whole.hidden is not None
        assert sum((one.hidden.rows for one in own if one.hidden), ()) == whole.hidden.rows
        sampled = [one.rows[row].slot for one in own for row in one.sampled_rows]
        assert sampled == [*whole.sampled_rows]


@given(st.integers(0, 1200), st.lists(st.integers(1, 70), min_size=1, max_size=6))
def test_tables_of_paths(committed: int, lengths: list[int]) -> None:
    """Few shapes, which hold every path; rows that pad a pass look nowhere."""
    rows = [
        Row(committed + n, committed + n - 1, (*range(committed + 1, committed + n + 1),))
        for n in lengths
    ]
    addresses = np.arange(6)
    sessions = [paths.Session(rows, committed, 4096, addresses)] * 2
    shape = paths.table_shape(sessions)
    assert shape.path >= max(64, *lengths)
    assert (shape.spans.bit_length() - 1) % 2 == 0
    assert shape.spans * paths.SPAN >= committed + max(lengths)
    table = paths.path_table(sessions, 2 * len(rows) + 3, shape)
    assert (table[2 * len(rows) :, paths.POSITION] == paths.NO_ROW).all()
    for line, row in zip(table, [*rows, *rows], strict=False):
        assert line[:4].tolist() == [row.position, committed, row.slot, 4096]
        assert line[4:10].tolist() == addresses.tolist()
        assert line[10 : 10 + len(row.visible)].tolist() == [*row.visible]


def test_a_kernel_that_computes_otherwise_is_not_taken() -> None:
    here = torch.device("cpu")
    assert paths.agrees(paths.attend_row_by_row, here)
    assert not paths.agrees(lambda *given: paths.attend_row_by_row(*given) + 1e-3, here)


@pytest.mark.parametrize("buckets", [*EXACT_BUCKETS, ()])
def test_buckets(buckets: tuple[int, ...]) -> None:
    for rows in range(1, 600):
        found = padded(rows, buckets)
        assert found >= rows
        assert not buckets or found in buckets or (rows > buckets[-1] and not found % buckets[-1])


def exact_or_skip(stages: list[HFStage]) -> None:
    """A user's device may give no guarantee, and says so."""
    if DEVICE is not EMULATED and any(stage.guarantee == "tolerance" for stage in stages):
        pytest.skip(f'the self-test says "tolerance" on {DEVICE.description}')
    assert [stage.guarantee for stage in stages] == ["bitwise"] * len(stages)


def emulated(tiny: Callable[..., Path], family: str, stages: int = 2) -> list[HFStage]:
    return cut(open_checkpoint(tiny(family)), stages, device=EMULATED)


@pytest.mark.parametrize("where", DEVICES, ids=lambda device: device.name)
@pytest.mark.parametrize(
    "family",
    [
        "gemma2",
        *(
            pytest.param(x, marks=pytest.mark.nightly)
            for x in ("llama", "qwen3.5", "mixtral", "gpt-oss", "deepseek-v3")
        ),
    ],
)
def test_an_accelerator_is_exact(
    tiny: Callable[..., Path], family: str, where: device.Device
) -> None:
    """Padded, cut and captured passes with masks made on the device, bit by bit."""
    stages = cut(open_checkpoint(tiny(family)), 2, device=where)
    exact_or_skip(stages)
    assert f"on {where.description}" in stages[0].weights
    same_bits(stages, family)


@pytest.mark.slow
@pytest.mark.parametrize("where", DEVICES, ids=lambda device: device.name)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def test_conformance_of_an_accelerator(
    tiny: Callable[..., Path], dtype: str, where: device.Device
) -> None:
    """Passes of several sessions, captured."""
    checkpoint = open_checkpoint(tiny("llama"))
    made = {count: cut(checkpoint, count, dtype, device=where) for count in (1, 2)}
    exact_or_skip(made[2])
    engines.check_batches_equal_sequential(
        made.__getitem__, 150, 1, (Sampling(), Sampling(temperature=0.8, seed=4)), length=15
    )
    engines.check_begins_like_another(made.__getitem__, 150, 0)
    engines.check_wire(made.__getitem__)
    engines.check_release(made.__getitem__)
    graphs, layers = made[2][0].shard.graphs, made[2][0].shard.model.model.layers
    assert graphs is not None
    assert not graphs.failure
    assert all(isinstance(layer, CapturedLayer) for layer in layers)
    assert graphs._stacks if where.path_kernel else all(layer._after for layer in layers)


def multiply_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers of an emulated device whose rows have the same bits in passes of any size, as
    not all CPUs' products have."""
    multiply = torch.nn.functional.linear

    def row_by_row(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, 1, x.shape[-1]).unbind()
        products = torch.cat([multiply(row, *weights) for row in rows])
        return products.view(*x.shape[:-1], -1)

    monkeypatch.setattr(torch.nn.functional, "linear", row_by_row)


def test_long_passes_run_in_parts(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one bucket, as where two round differently."""
    multiply_row_by_row(monkeypatch)
    monkeypatch.setattr("asyncspec.plugins.hf.model.self_test.EXACT_BUCKETS", ((8,),))
    stages = emulated(tiny, "qwen3")
    assert [stage.settings.buckets for stage in stages] == [(8,), (8,)]
    assert [stage.guarantee for stage in stages] == ["bitwise"] * 2
    # Chunks of 64 rows, and passes of two sessions.
    both = Sampling(), Sampling()
    engines.check_batches_equal_sequential(lambda _: stages, 150, 3, both, length=8)


def test_products_that_differ_by_place_leave_no_guarantee(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    blind = torch.nn.functional.linear

    def sees(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return blind(x, *weights) * (1 + 1e-6 * torch.arange(x.shape[-2])[:, None])

    monkeypatch.setattr(torch.nn.functional, "linear", sees)
    (stage,) = emulated(tiny, "llama", 1)
    assert (stage.guarantee, stage.settings.buckets) == ("tolerance", EXACT_BUCKETS[-1])


def test_fast_mode_and_float16(tiny: Callable[..., Path]) -> None:
    """The logits of an accelerator next to the CPU's."""
    checkpoint = open_checkpoint(tiny("llama"))
    rows = tuple(Row(i, i, (*range(i + 1),)) for i in range(20))
    found = []
    for dtype, where in (("float32", CPU), ("float32", DEVICES[-1]), ("float16", DEVICE)):
        stage = load_stage(checkpoint, 0, 4, dtype=dtype, mode="fast", device=where)
        stage.run(Admit(SESSION, 32, Sampling()))
        hidden = stage.run(Forward(SESSION, SegmentId(0), 0, rows, tokens=tuple(range(20))))
        assert isinstance(hidden, torch.Tensor)
        assert hidden.dtype == getattr(torch, dtype)
        found.append(hidden.float())
    largest = found[0].abs().max()
    assert (found[1] - found[0]).abs().max() < 1e-5 * largest
    assert (found[2] - found[0]).abs().max() < 1e-2 * largest


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_passes_stay_on_the_device(
    tiny: Callable[..., Path], family: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor of the host in the midst of a pass, and no number that the host waits for: one copy
    there and one back."""
    monkeypatch.setattr("asyncspec.plugins.hf.model.self_test.EXACT_BUCKETS", ((16, 64, 256),))
    stage = load_stage(
        open_checkpoint(tiny(family)),
        *(1, 4),
        mode=mode,  # type: ignore[arg-type]
        device=EMULATED,
    )
    gpu, hidden = FakeGpu(), torch.zeros(90, stage.info.hidden_size)
    with fake_mode():
        move(stage.shard, gpu)
        stage.run(Admit(SESSION, 512, Sampling()))
        rows = tuple(Row(i, i, (*range(i + 1),)) for i in range(90))
        given = TensorRows(hidden, tuple(range(90)))
        out = stage.run(Forward(SESSION, SegmentId(0), 0, rows, hidden=given))
        assert isinstance(out, torch.Tensor)
        assert (out.shape, out.device.type) == (hidden.shape, "cpu")
        stage.run(Compact(SESSION, 80, (82, 85)))
        rows = (Row(82, 82, (80, 81, 82)), Row(84, 82, (80, 81, 84)))
        given = TensorRows(hidden, (0, 1))
        stage.run(Forward(SESSION, SegmentId(1), 80, rows, hidden=given))
    assert gpu.fetched == 2


def test_a_head_predicts_as_on_the_cpu() -> None:
    """The bundled EAGLE-3 head, and what is likeliest after its predictions."""
    target = open_checkpoint(BUNDLED_TARGET)
    opened = open_eagle(BUNDLED_EAGLE, target.info)
    rows = [Row(i, i, (*range(i + 1),)) for i in range(3)]
    found = []
    for where in (CPU, DEVICE):
        head = load_head(opened, target, "float32", where)
        tree = FastAttention(KVCache(head.cache_shape, 64, where), 0, rows)
        given = where.put(noise(3, head.features.width))
        with torch.inference_mode():
            features = head.layer_features(given)
            tokens, positions = where.integers((5, 6, 7)), where.integers(range(3))
            predicted = head.predict(features, tokens, positions, tree)
            found.append((predicted.cpu(), head.successors(predicted, 1)))
    (want, best), (got, successors) = found
    assert (got - want).abs().max() < 1e-4 * want.abs().max()
    assert [tokens for tokens, _ in successors] == [tokens for tokens, _ in best]


def test_emulated_graphs_overwrite_their_results() -> None:
    graph = capture_emulated(lambda x: (x + 1,), (torch.zeros(3),))
    (first,) = graph(torch.ones(3))
    (second,) = graph(torch.full((3,), 2.0))
    assert first is second
    assert second.tolist() == [3, 3, 3]
    with pytest.raises(ValueError, match=r"a graph of \(3,\) was given \(2,\)"):
        graph(torch.ones(2))


def test_quantised_weights() -> None:
    """By torch's product where there is one, else rounded: next to the dequantised matrix."""
    dense, x = noise(48, 64), noise(5, 64, seed=1)
    for kind in ("int8", "int4"):
        linear = quantized.quantized_linear(
            kind,  # type: ignore[arg-type]
            *(dense.shape, lambda first, end: dense[first:end], torch.float32, None, EMULATED),
        )
        packs = kind == "int8" and quantized.has_product("int8", EMULATED)
        assert packs == isinstance(linear, quantized.QuantizedDeviceLinear)
        assert linear.description == ("int8" if packs else linear.description)
        off = (linear(x) - x @ dense.T).abs().max() / (x @ dense.T).abs().max()
        assert off < (0.02 if kind == "int8" else 0.15)
    packed = quantize(lambda first, end: dense[first:end], (48, 64), 4, 32)
    rounded = quantized.packed_linear(packed, torch.float32, None, EMULATED)
    assert rounded.description.startswith("int4 in blocks of 32 as float32 (no product for it on")
    assert torch.equal(rounded(x), torch.nn.functional.linear(x, packed.dequantized()))


@given(
    *(st.integers(1, 300), st.integers(1, 700), st.sampled_from(int4.GROUPS), st.booleans()),
    st.sampled_from((32, 64)),
)
@settings(max_examples=15, deadline=None)
def test_int4_words(outputs: int, width: int, group: int, middle: bool, words: int) -> None:
    """What a kernel reads, by the definition of its result, next to the packed matrix: the numbers
    of zero points cost a scale some 2^-20."""
    dense, x = noise(outputs, width), noise(3, width, seed=1)
    matrix = quantize(lambda first, end: dense[first:end], (outputs, width), 4, group)
    if middle:
        matrix = replace(matrix, zero_points=None)
    words = min(words, group)
    weights = int4.pack_int4(matrix, torch.device("cpu"), words)
    got = int4.multiply_by_definition(x, weights)
    assert (got - x @ matrix.dequantized().T).abs().max() <= 1e-4 * width**0.5 * x.abs().max()
    tiles, steps, tile, own = weights.words.shape
    assert (tiles * tile) % int4.MOST_OUTPUTS == 0
    assert (tiles - 2) * tile < outputs <= tiles * tile
    assert (tile, own) == (int4.TILE, words)
    assert (steps - 1) * 4 * words < width <= steps * 4 * words
    assert weights.scales.shape[1] == tiles * tile
    assert len(weights.scales) == steps * max(1, 4 * words // group)
    assert weights.bytes_held >= int4.int4_bytes(outputs, width, group)


def test_int4_is_cut_by_its_shape() -> None:
    """Until a GPU is full, but not in short parts."""
    values, scales = torch.zeros(4096, 1024, dtype=torch.uint8), torch.ones(4096, 32)
    matrix = PackedMatrix(4, 64, 2048, values, scales)
    for rows, splits in ((4096, 4), (1024, 4), (128, 4)):
        own = replace(matrix, values=values[:rows], scales=scales[:rows])
        assert int4.pack_int4(own, torch.device("cpu")).splits == splits
    wide = replace(matrix, values=values.view(16384, 256), columns=512, scales=torch.ones(16384, 8))
    assert int4.pack_int4(wide, torch.device("cpu")).splits == 1


def test_an_int4_kernel_that_computes_otherwise_is_not_taken() -> None:
    here, right = torch.device("cpu"), int4.multiply_by_definition

    def by_number(x: torch.Tensor, weights: int4.Int4Weights) -> torch.Tensor:
        return right(x, weights) * (1 + 2**-7 * (len(x) > 8))

    def without_zero_points(x: torch.Tensor, weights: int4.Int4Weights) -> torch.Tensor:
        return right(x, replace(weights, scales=weights.scales & -16))

    for dtype in (torch.bfloat16, torch.float16):
        assert int4.agrees(right, here, dtype, 64)
        assert not int4.agrees(by_number, here, dtype, 64)
        assert not int4.agrees(without_zero_points, here, dtype, 64)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.nightly)])
def test_int4_layers_on_a_device_with_a_kernel(tiny: Callable[..., Path], dtype: str) -> None:
    """In exact mode, bit by bit; next to the same matrices dequantised."""
    where = DEVICES[-1]
    stages = cut(open_checkpoint(tiny("llama")), 2, dtype, quantize="int4", device=where)
    exact_or_skip(stages)
    assert stages[0].weights.startswith("int4 in blocks of 32 and int4 in blocks of 64 on ")
    linears = [x for x in stages[0].shard.linears if isinstance(x, quantized.QuantizedDeviceLinear)]
    assert len(linears) == 14
    same_bits(stages, "llama")


def test_the_layout_of_cuda_s_int4(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be given to it, by the definition of its result: the first of two levels is in the
    upper half of a byte, and a weight is (level - 8) * scale + offset."""
    dense, x = noise(16, 64), noise(3, 64, seed=1)
    matrix = quantize(lambda first, end: dense[first:end], (16, 64), 4, 32)

    def convert(values: torch.Tensor, tiles: int) -> torch.Tensor:
        assert (values.dtype, values.shape) == (torch.uint8, (16, 32))
        return values

    def multiply(
        x: torch.Tensor, values: torch.Tensor, block: int, steps: torch.Tensor
    ) -> torch.Tensor:
        assert steps.shape == (64 // block, 16, 2)
        levels = torch.stack([values >> 4, values & 15], -1).flatten(1).float()
        scale, offset = steps.float().transpose(0, 1).repeat_interleave(block, 1).unbind(-1)
        return x @ ((levels - 8) * scale + offset).T.to(x.dtype)

    monkeypatch.setattr(torch, "_convert_weight_to_int4pack", convert)
    monkeypatch.setattr(torch, "_weight_int4pack_mm", multiply)
    # Of another type than "cpu", whose layout is another.
    monkeypatch.setattr(EMULATED, "torch", torch.device("meta"))
    monkeypatch.setattr(EMULATED, "put", lambda x: x)
    got = quantized._int4_product(matrix, EMULATED)(x.bfloat16()).float()
    want = x @ matrix.dequantized().T
    assert (got - want).abs().max() < 0.02 * want.abs().max()
