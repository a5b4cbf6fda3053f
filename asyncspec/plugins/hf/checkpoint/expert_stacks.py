"""Names of the tensors of mixtures of experts.

transformers stacks the matrices of a layer's experts in two tensors. Here every expert has three
linear layers, whose weights are runs of a stack's bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product

from msgspec.structs import replace

from asyncspec.plugins.hf.checkpoint.files.headers import TensorInfo

_BLOCKS = ("mlp", "feed_forward", "mixer", "block_sparse_moe")
ROUTERS = tuple(f"{block}.{name}.linear" for block in _BLOCKS for name in ("gate", "router"))
"""How the name of a router's linear layer ends."""
GATES = (*ROUTERS, "mlp.shared_expert_gate.linear")
"""The same of linear layers that are too small, and matter too much, to be quantised."""

_GATE_NAME = rf"(\.(?:{'|'.join(_BLOCKS)})\.(?:gate|router|shared_expert_gate))"
_GATE = re.compile(rf"{_GATE_NAME}\.weight$")
_LINEAR_GATE = re.compile(rf"{_GATE_NAME}\.linear\.weight$")
BIAS = "gate_up_proj_bias"
"""What the experts of gpt-oss have: matrices [in, out], and gate and up in turn."""

_MIXTRAL_BLOCK = re.compile(r"\.block_sparse_moe\.(?=gate\.|e_score|experts\.\d+\.w\d)")
"""A block that transformers has as ``mlp``; Granite's keeps its name."""

_GRANITE = {
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
    ".block_sparse_moe.router.layer.weight": ".block_sparse_moe.router.weight",
}
"""How names end in Granite 4's files, and in its model."""

_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_GATED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_STACKS = {**_GATED, "up_proj": ("up_proj",)}
_EXPERT = re.compile(rf"(.*\.(?:{'|'.join(_BLOCKS)})\.experts)\.(\d+)\.(\w+)\.weight")
_UNGATED = ".mixer.experts"
"""How the names of Nemotron 3's experts begin, which have no gates."""
_STEMS = tuple(f".{block}.experts" for block in _BLOCKS)


def is_transposed(gate_up: Sequence[int], down: Sequence[int]) -> bool:
    """Whether stacks of these shapes have matrices [in, out]."""
    return gate_up[2] == 2 * down[1]


def unstack_experts(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Tensors by name, each matrix of stacked experts (a run of the stack's bytes) apart."""
    matrices: dict[str, TensorInfo] = {}
    for stored, info in tensors.items():
        end = next(filter(stored.endswith, _GRANITE), "")
        name = stored.removesuffix(end) + _GRANITE.get(end, "")
        stem, _, stack = name.rpartition(".")
        parts = _STACKS.get(stack) if stem.endswith(_STEMS) else None
        if parts is not None and len(info.shape) == 3 and _transposes(tensors, stem):
            count, width, height = info.shape
            size = info.size // count
            for number in range(count):
                offset, shape = info.offset + number * size, (height, width)
                matrices[f"{stem}.{number}.{stack}.weight"] = replace(
                    info, offset=offset, size=size, shape=shape, transposed=True
                )
            continue
        if parts is None or len(info.shape) != 3 or info.shape[1] % len(parts):
            matrices[name] = info
            continue
        count, height, width = info.shape
        size = info.size // (count * len(parts))
        shape = (height // len(parts), width)
        for i, (number, part) in enumerate(product(range(count), parts)):
            matrix = replace(info, offset=info.offset + i * size, size=size, shape=shape)
            matrices[f"{stem}.{number}.{part}.weight"] = matrix
    return matrices


def _transposes(tensors: Mapping[str, TensorInfo], stem: str) -> bool:
    """Whether the stacks of a layer's experts have matrices [in, out]."""
    if f"{stem}.{BIAS}" in tensors:
        return True
    shapes = [tensors[name].shape for part in _GATED if (name := f"{stem}.{part}") in tensors]
    return [*map(len, shapes)] == [3, 3] and is_transposed(*shapes)


def split_name(name: str) -> str:
    """What a checkpoint's tensor is called in a model whose experts were opened."""
    name = _GATE.sub(r"\1.linear.weight", _MIXTRAL_BLOCK.sub(".mlp.", name))
    if (expert := _EXPERT.fullmatch(name)) is None:
        return name
    stem, number, part = expert.groups()
    return f"{stem}.{number}.{_MIXTRAL.get(part, part)}.weight"


def expected_shapes(matrices: Mapping[str, TensorInfo]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that transformers expects for these matrices, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    counts: dict[str, int] = {}
    for name, info in matrices.items():
        if (expert := _EXPERT.fullmatch(name)) is None:
            shapes[_LINEAR_GATE.sub(r"\1.weight", name)] = info.shape
        else:
            stem, number, _ = expert.groups()
            counts[stem] = max(counts.get(stem, 0), int(number) + 1)
    for stem, count in counts.items():
        for part in _GATED:
            matrix = matrices.get(f"{stem}.0.{part}.weight")
            if matrix is not None and matrix.transposed:
                shapes[f"{stem}.{part}"] = (count, *reversed(matrix.shape))
        gate, down = (
            matrices.get(f"{stem}.0.{part}.weight") for part in ("gate_proj", "down_proj")
        )
        up = matrices.get(f"{stem}.0.up_proj.weight")
        if stem.endswith(_UNGATED) and up is not None and down is not None:
            shapes[f"{stem}.up_proj"] = (count, *up.shape)
            shapes[f"{stem}.down_proj"] = (count, *down.shape)
        if gate is not None and down is not None and not down.transposed:
            inner, width = gate.shape
            shapes[f"{stem}.gate_up_proj"] = (count, 2 * inner, width)
            shapes[f"{stem}.down_proj"] = (count, *down.shape)
    return shapes
