"""Names of the tensors of mixtures of experts.

transformers stacks the matrices of a layer's experts in two tensors. Here every expert has three
linear layers, whose weights are runs of a stack's bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product

from msgspec.structs import replace

from asyncspec.plugins.hf.checkpoint.files.headers import TensorInfo

ROUTERS = ("mlp.gate.linear", "mlp.router.linear")
"""How the name of a router's linear layer ends."""
GATES = (*ROUTERS, "mlp.shared_expert_gate.linear")
"""The same of linear layers that are too small, and matter too much, to be quantised."""

_GATE = re.compile(r"(\.mlp\.(?:gate|router|shared_expert_gate))\.weight$")
_LINEAR_GATE = re.compile(r"(\.mlp\.(?:gate|router|shared_expert_gate))\.linear\.weight$")
BIAS = "gate_up_proj_bias"
"""What the experts of gpt-oss have: matrices [in, out], and gate and up in turn."""

_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)\.weight")


def unstack_experts(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Tensors by name, each matrix of stacked experts (a run of the stack's bytes) apart."""
    matrices: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        stem, _, stack = name.rpartition(".")
        parts = _STACKS.get(stack) if stem.endswith(".mlp.experts") else None
        if parts is not None and len(info.shape) == 3 and f"{stem}.{BIAS}" in tensors:
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


def split_name(name: str) -> str:
    """What a checkpoint's tensor is called in a model whose experts were opened."""
    name = _GATE.sub(r"\1.linear.weight", name.replace(".block_sparse_moe.", ".mlp."))
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
        for part in _STACKS:
            matrix = matrices.get(f"{stem}.0.{part}.weight")
            if matrix is not None and matrix.transposed:
                shapes[f"{stem}.{part}"] = (count, *reversed(matrix.shape))
        gate, down = (
            matrices.get(f"{stem}.0.{part}.weight") for part in ("gate_proj", "down_proj")
        )
        if gate is not None and down is not None and not down.transposed:
            inner, width = gate.shape
            shapes[f"{stem}.gate_up_proj"] = (count, 2 * inner, width)
            shapes[f"{stem}.down_proj"] = (count, *down.shape)
    return shapes
