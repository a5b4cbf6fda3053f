"""A family's gated delta net layer with the states of a tree (``recurrent.py``) in place of its own
scan, made of the family's modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from asyncspec.core.jobs import Row
from asyncspec.plugins.hf.attention.attention import TreeMask
from asyncspec.plugins.hf.attention.recurrent import Inputs, StateCache, StateShape, convolved
from asyncspec.plugins.hf.kernels.cpu.elementwise import Exp, PaddedActivation
from asyncspec.plugins.hf.kernels.cpu.linear import pad_rows

_EPSILON = 1e-6
"""Epsilon of the norm of queries and keys, in all families."""

_NORM_ROWS = 64
"""The gated norm's activation runs over whole vectors of elements (``elementwise.py``)."""


def state_shape(family: Any) -> StateShape:
    """Shape of transformers' gated delta net layer. Raises ``AttributeError`` for another kind."""
    return StateShape(
        heads=family.num_v_heads,
        key_width=family.head_k_dim,
        value_width=family.head_v_dim,
        channels=family.conv_dim,
        kernel=family.conv_kernel_size,
        key_heads=family.num_v_heads,
    )


class DeltaNet(nn.Module):
    """A layer whose states are gated delta nets'; subclasses are the families'."""

    def __init__(self, family: Any, layer: int, shape: StateShape, norm: str, output: str) -> None:
        """``norm``, ``output``: the names of the gated norm and of the last product in ``family``,
        where packed products take the place of modules that are held nowhere else."""
        super().__init__()
        self.layer_idx, self.shape = layer, shape
        self.family, self._norm, self._output = family, norm, output
        self._activation, self._sigmoid, self._softplus = (
            PaddedActivation(kind) for kind in (nn.SiLU(), nn.Sigmoid(), nn.Softplus())
        )
        self._exp = PaddedActivation(Exp())
        if family.activation not in ("silu", "swish"):
            raise AttributeError(f"a convolution followed by {family.activation}")

    def forward(self, hidden_states: Tensor, tree: TreeMask, **_: Any) -> Tensor:
        """Hidden states [1, n, H] -> [1, n, H]."""
        channels, gate, strength, step_size = self._products(hidden_states)
        read = tree.recur(self, channels[0], strength[0], step_size[0]).to(hidden_states.dtype)
        rows = read.flatten(0, 1)
        padded = -(-len(rows) // _NORM_ROWS) * _NORM_ROWS
        norm, output = getattr(self.family, self._norm), getattr(self.family, self._output)
        gated = norm(*(pad_rows(x, padded) for x in (rows, gate.reshape(-1, rows.shape[1]))))
        out: Tensor = output(gated[: len(rows)].view(*hidden_states.shape[:2], -1))
        return out

    def _products(self, x: Tensor) -> tuple[Tensor, ...]:
        """Inputs of the convolution [1, n, channels], gate [1, n, heads * V], strength and step
        size before their activations [1, n, heads]."""
        raise NotImplementedError

    def _heads(
        self, windows: Tensor, strength: Tensor, step_size: Tensor
    ) -> tuple[Tensor, list[Inputs]]:
        """Queries [n, heads, K] of rows, and what each adds to the state, from their windows of
        inputs [n, kernel, channels] in float32."""
        raise NotImplementedError

    def read(
        self, states: StateCache, committed: int, rows: Sequence[Row], *inputs: Tensor
    ) -> Tensor:
        """As ``RecurrentLayer``."""
        channels, strength, step_size = inputs
        windows = states.windows(committed, rows, channels)
        return states.read(committed, rows, *self._heads(windows, strength, step_size))


class QwenDelta(DeltaNet):
    """The layer of Qwen3-Next or Qwen3.5. Raises ``AttributeError`` where ``family`` has other
    parts."""

    def __init__(self, family: Any, layer: int) -> None:
        super().__init__(family, layer, state_shape(family), "norm", "out_proj")
        self._sizes = (family.key_dim, family.key_dim, family.value_dim)
        self._key_heads: int = family.num_k_heads
        # How the products are cut apart is the family's.
        self._stacked = hasattr(family, "in_proj_qkvz")

    def _products(self, x: Tensor) -> tuple[Tensor, ...]:
        family = self.family
        if not self._stacked:
            parts = (family.in_proj_qkv, family.in_proj_z, family.in_proj_b, family.in_proj_a)
            return tuple(part(x) for part in parts)
        stacked = family.in_proj_qkvz(x), family.in_proj_ba(x)
        query, key, value, gate, strength, step_size = family.fix_query_key_value_ordering(*stacked)
        channels = torch.cat([part.flatten(2) for part in (query, key, value)], -1)
        return channels, gate, strength, step_size

    def _heads(
        self, windows: Tensor, strength: Tensor, step_size: Tensor
    ) -> tuple[Tensor, list[Inputs]]:
        family, shape = self.family, self.shape
        mixed = convolved(windows, family.conv1d)
        # Rounded where the family rounds.
        mixed = self._activation(mixed.to(strength.dtype)).float()
        query, key, value = mixed.split_with_sizes(self._sizes, -1)
        count = len(mixed)
        groups = shape.heads // self._key_heads
        query, key = (
            normalized(x.reshape(count, self._key_heads, -1)).repeat_interleave(groups, 1)
            for x in (query, key)
        )
        query = query * shape.key_width**-0.5
        value = value.reshape(count, shape.heads, -1)
        rate = family.A_log.float().exp() * self._softplus(step_size.float() + family.dt_bias)
        decay, strength = self._exp(-rate), self._sigmoid(strength).float()
        each = zip(key, value, decay, strength, strict=True)
        return query, [Inputs(*(part.clone() for part in parts)) for parts in each]


def normalized(x: Tensor) -> Tensor:
    """Rows of length one."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPSILON)
