"""Mixture of experts: an expert's matrices as linear layers of their own.

transformers stacks the experts of a layer in two tensors and multiplies slices of them. Here every
expert has three linear layers, so that they are packed or quantised as all others are, and rows
meet products whose bits do not depend on how many rows an expert is given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from asyncspec.backend.hf.checkpoint_files import TensorInfo

ROUTER = "mlp.gate.linear"
"""How the name of a router's linear layer ends."""

_GATE = ".mlp.gate.weight"
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)\.weight")


def unstack_experts(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Tensors by name, each matrix of stacked experts (a run of the stack's bytes) apart."""
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        stem, _, stack = name.rpartition(".")
        parts = _STACKS.get(stack) if stem.endswith(".mlp.experts") else None
        if parts is None or len(info.shape) != 3 or info.shape[1] % len(parts):
            found[name] = info
            continue
        count, height, width = info.shape
        size = info.size // (count * len(parts))
        shape = (height // len(parts), width)
        for i, (number, part) in enumerate(product(range(count), parts)):
            one = replace(info, offset=info.offset + i * size, size=size, shape=shape)
            found[f"{stem}.{number}.{part}.weight"] = one
    return found


def split_name(name: str) -> str:
    """What a checkpoint's tensor is called in a model whose experts were opened."""
    name = name.replace(".block_sparse_moe.", ".mlp.").replace(_GATE, f".{ROUTER}.weight")
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
            shapes[name.replace(f".{ROUTER}.weight", _GATE)] = info.shape
        else:
            stem, number, _ = expert.groups()
            counts[stem] = max(counts.get(stem, 0), int(number) + 1)
    for stem, count in counts.items():
        gate, down = (
            matrices.get(f"{stem}.0.{part}.weight") for part in ("gate_proj", "down_proj")
        )
        if gate is not None and down is not None:
            inner, width = gate.shape
            shapes[f"{stem}.gate_up_proj"] = (count, 2 * inner, width)
            shapes[f"{stem}.down_proj"] = (count, *down.shape)
    return shapes


def split_experts(model: nn.Module) -> None:
    """Exchange routers and experts in place. The new linear layers have no weights yet."""
    for block in list(model.modules()):
        experts: Any = getattr(block, "experts", None)
        if isinstance(getattr(experts, "gate_up_proj", None), nn.Parameter):
            block.experts = Experts(experts)
            block.gate = Router(block.gate)


class Router(nn.Module):
    """Where each row goes, and with what weights. The logits are computed here; the family's own
    code gets them by a product with the identity, which changes nothing."""

    def __init__(self, family: Any) -> None:
        super().__init__()
        count, width = family.weight.shape
        self.linear = nn.Linear(width, count, bias=False, device="meta")
        family.weight = nn.Parameter(torch.eye(count, dtype=family.weight.dtype))
        family.hidden_dim = count
        self.family = family

    def forward(self, hidden: Tensor) -> Any:
        """hidden [n, H]. Returns logits [n, E], weights [n, k] and experts [n, k] (int64)."""
        return self.family(self.linear(hidden))


class Expert(nn.Module):
    """One gated feed-forward layer."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False, device="meta")
        self.up_proj = nn.Linear(width, inner, bias=False, device="meta")
        self.down_proj = nn.Linear(inner, width, bias=False, device="meta")


class Experts(nn.ModuleList):
    """The experts of a layer."""

    def __init__(self, family: Any) -> None:
        count, width, inner = family.down_proj.shape
        super().__init__(Expert(width, inner) for _ in range(count))
        self.act_fn = family.act_fn

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden [n, H]; chosen (int64) and weights [n, k]. Returns [n, H]: for each row the sum of
        its experts in the order of their numbers, whatever other rows there are."""
        out = torch.zeros_like(hidden)
        for number in sorted(set(chosen.flatten().tolist())):
            rows, places = torch.where(chosen == number)
            expert: Any = self[number]
            x = hidden[rows]
            x = expert.down_proj(self.act_fn(expert.gate_proj(x)) * expert.up_proj(x))
            out.index_add_(0, rows, (x * weights[rows, places, None]).to(out.dtype))
        return out
