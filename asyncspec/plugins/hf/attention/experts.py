"""Mixture of experts: an expert's matrices as linear layers of their own.

transformers stacks the experts of a layer in two tensors and multiplies slices of them. Here every
expert has three linear layers, so that they are packed or quantised as all others are, and rows
meet products whose bits do not depend on how many rows an expert is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from asyncspec.plugins.hf.checkpoint.expert_stacks import BIAS, is_transposed
from asyncspec.plugins.hf.kernels.cpu.elementwise import Function
from asyncspec.plugins.hf.kernels.cpu.linear import pad_rows

_ROUTED_ROWS = 64


def split_experts(model: nn.Module) -> None:
    """Exchange routers and experts in place. The new linear layers have no weights yet."""
    block: Any
    for path, block in list(model.named_modules()):
        experts: Any = getattr(block, "experts", None)
        if isinstance(getattr(experts, "down_proj", None), nn.Parameter):
            block.experts = Experts(experts)
            name = "router" if hasattr(block, "router") else "gate"
            if isinstance(getattr(block, name), nn.Linear):
                block.router = Router(block.router)
                model.set_submodule(path, ScaledMixture(block))
            elif (route := getattr(block, "route_tokens_to_experts", None)) is not None:
                block.gate = LogitsRouter(block.gate)
                block.route_tokens_to_experts = partial(_routed, route)
            else:
                setattr(block, name, Router(getattr(block, name)))
        shared: Any = getattr(block, "shared_expert_gate", None)
        if isinstance(shared, nn.Linear):
            block.shared_expert_gate = SharedGate(shared)


class Router(nn.Module):
    """Where each row goes, and with what weights. The logits are computed here; the family's own
    code gets them by a product with the identity, which changes nothing."""

    def __init__(self, family: Any) -> None:
        super().__init__()
        count, width = family.weight.shape
        # Some families route in float32 whatever the model computes in.
        self.dtype = family.weight.dtype
        self.linear = nn.Linear(width, count, bias=False, device="meta")
        family.weight = nn.Parameter(torch.eye(count, dtype=family.weight.dtype))
        family.hidden_dim = count
        self.family = family

    def forward(self, hidden: Tensor, *biases: Tensor) -> Any:
        """hidden [n, H]; ``biases``: what the family's block hands on. Returns what the family's
        router does, such as logits [n, E], weights [n, k] and experts [n, k] (int64)."""
        hidden = hidden.reshape(-1, hidden.shape[-1])
        logits = self.linear(hidden.to(self.dtype))
        return _routed(lambda rows: self.family(rows, *biases), logits)


class LogitsRouter(nn.Module):
    """A router as transformers before 5.14 has them of DeepSeek-V3 and its likes: logits alone, in
    float32; the block routes by them."""

    dtype = torch.float32

    def __init__(self, family: Any) -> None:
        super().__init__()
        count, width = family.weight.shape
        self.linear = nn.Linear(width, count, bias=False, device="meta")
        self.register_buffer("e_score_correction_bias", family.e_score_correction_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [n, E]."""
        logits: Tensor = self.linear(hidden.reshape(-1, hidden.shape[-1]).to(self.dtype))
        return logits


def _routed(route: Callable[[Tensor], Iterable[Tensor]], logits: Tensor) -> tuple[Tensor, ...]:
    """What ``route`` makes of logits [n, E], in whole vectors of activations
    (``elementwise.py``)."""
    padded = pad_rows(logits, -(-len(logits) // _ROUTED_ROWS) * _ROUTED_ROWS)
    return tuple(part[: len(logits)] for part in route(padded))


class SharedGate(nn.Module):
    """The gate of an expert that all rows go through: its one output a row, repeated in every
    column, so that the activation behind it runs over whole vectors (``whole_rows``)."""

    def __init__(self, family: nn.Linear) -> None:
        super().__init__()
        self.width = family.in_features
        self.linear = nn.Linear(family.in_features, 1, bias=False, device="meta")

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., H]."""
        gate: Tensor = self.linear(hidden)
        return gate.expand(hidden.shape).contiguous()


def whole_rows(model: nn.Module) -> int:
    """Numbers of rows that are multiples of this fill whole vectors of what families activate in
    functions of their own: gates of attention (Qwen3-Next, Qwen3.5), and of shared experts."""
    steps = [1]
    for module in model.modules():
        if isinstance(module, SharedGate):
            steps.append(_ROUTED_ROWS // math.gcd(module.width, _ROUTED_ROWS))
        query, output = (getattr(module, f"{name}_proj", None) for name in "qo")
        width: Any = getattr(output, "in_features", 0)
        # Queries and their gates are one product.
        if width and getattr(query, "out_features", 0) == 2 * width:
            steps.append(_ROUTED_ROWS // math.gcd(width, _ROUTED_ROWS))
    return math.lcm(*steps)


class Expert(nn.Module):
    """One gated feed-forward layer."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False, device="meta")
        self.up_proj = nn.Linear(width, inner, bias=False, device="meta")
        self.down_proj = nn.Linear(inner, width, bias=False, device="meta")

    def forward(self, x: Tensor, activation: Any) -> Tensor:
        """x [n, H] -> [n, H]."""
        out: Tensor = self.down_proj(activation(self.gate_proj(x)) * self.up_proj(x))
        return out


class PlainExpert(nn.Module):
    """A feed-forward layer without a gate, as an expert of Nemotron 3."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, inner, bias=False, device="meta")
        self.down_proj = nn.Linear(inner, width, bias=False, device="meta")

    def forward(self, x: Tensor, activation: Any) -> Tensor:
        """x [n, H] -> [n, H]."""
        out: Tensor = self.down_proj(activation(self.up_proj(x)))
        return out


class StackedExpert(nn.Module):
    """An expert of Llama 4, whose gate and up are halves of one matrix."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(width, 2 * inner, bias=False, device="meta")
        self.down_proj = nn.Linear(inner, width, bias=False, device="meta")

    def forward(self, x: Tensor, activation: Any) -> Tensor:
        """x [n, H] -> [n, H]."""
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        out: Tensor = self.down_proj(up * activation(gate))
        return out


class BiasedExpert(nn.Module):
    """An expert of gpt-oss: with biases, bounds on both halves, and gate and up in turn."""

    def __init__(self, family: Any, number: int) -> None:
        super().__init__()
        self.gate_up_proj = _biased(family.gate_up_proj, family.gate_up_proj_bias, number)
        self.down_proj = _biased(family.down_proj, family.down_proj_bias, number)
        self._alpha, self._limit = family.alpha, family.limit
        inner = self.down_proj.in_features
        # Rows that make whole vectors of the sigmoid's elements (``elementwise.py``).
        self._step = _ROUTED_ROWS // math.gcd(inner, _ROUTED_ROWS)

    def forward(self, x: Tensor, _: Any) -> Tensor:
        """x [n, H] -> [n, H]."""
        both = pad_rows(self.gate_up_proj(x), -(-len(x) // self._step) * self._step)
        gate = both[:, ::2].clamp(max=self._limit)
        up = both[:, 1::2].clamp(-self._limit, self._limit)
        inner = (up + 1) * (gate * torch.sigmoid(gate * self._alpha))
        out: Tensor = self.down_proj(inner[: len(x)])
        return out


def _biased(weights: Tensor, biases: Tensor, number: int) -> nn.Linear:
    """A layer whose weights are still to be read, of stacks [E, in, out] and [E, out]."""
    _, width, height = weights.shape
    linear = nn.Linear(width, height, device="meta")
    linear.bias = nn.Parameter(biases[number].detach().clone(), requires_grad=False)
    return linear


class Experts(nn.ModuleList):
    """The experts of a layer."""

    def __init__(self, family: Any) -> None:
        if hasattr(family, BIAS):
            count = len(family.down_proj)
            super().__init__(BiasedExpert(family, number) for number in range(count))
            self.act_fn: nn.Module = nn.Identity()
            return
        count, width, inner = family.down_proj.shape
        if not hasattr(family, "gate_up_proj"):
            super().__init__(PlainExpert(width, inner) for _ in range(count))
        elif is_transposed(family.gate_up_proj.shape, family.down_proj.shape):
            super().__init__(StackedExpert(inner, width) for _ in range(count))
        else:
            super().__init__(Expert(width, inner) for _ in range(count))
        activation = family.act_fn
        self.act_fn = activation if isinstance(activation, nn.Module) else Function(activation)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden [n, H]; chosen (int64) and weights [n, k]. Returns [n, H]: for each row the sum of
        its experts in the order of their numbers, whatever other rows there are."""
        # Nemotron 3 rounds the sum alone.
        kind = weights.dtype if isinstance(self[0], PlainExpert) else hidden.dtype
        out = torch.zeros_like(hidden, dtype=kind)
        for number in sorted(set(chosen.flatten().tolist())):
            rows, places = torch.where(chosen == number)
            expert: Any = self[number]
            x = expert(hidden[rows], self.act_fn)
            out.index_add_(0, rows, (x * weights[rows, places, None]).to(out.dtype))
        return out.to(hidden.dtype)


class ScaledMixture(nn.Module):
    """Llama 4's experts, whose inputs are scaled in place of their outputs, and the expert that all
    rows go through. The family gives every expert all rows, most of them zeros."""

    def __init__(self, family: Any) -> None:
        super().__init__()
        self.router, self.experts = family.router, family.experts
        self.shared_expert = family.shared_expert

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [1, n, H] -> [n, H], and logits [n, E]."""
        rows = hidden.flatten(0, -2)
        scores, logits = self.router(rows)
        routed = torch.zeros_like(rows, dtype=torch.float32)
        for number in range(scores.shape[1]):
            (chosen,) = torch.where(scores[:, number] > 0)
            if len(chosen):
                scaled = rows[chosen] * scores[chosen, number, None]
                out = self.experts[number](scaled, self.experts.act_fn)
                routed.index_add_(0, chosen, out.float())
        return self.shared_expert(rows) + routed.to(rows.dtype), logits
