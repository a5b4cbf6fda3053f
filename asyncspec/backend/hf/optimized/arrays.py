"""Optimized layers of float32 rows and float16 weights, by numpy between FBGEMM's products.

Behind a product that has read megabytes of weights, no cache holds the code of torch's operations,
and each takes ten times as long as in a loop; numpy's take a third of that. Sums of squares and
exponentials round otherwise than torch's, so such a layer is compared like a graph (``graphs.py``).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from asyncspec.backend.hf.attention import Array, TreeMask
from asyncspec.backend.hf.kernels.cpu.half_precision import HalfLinear
from asyncspec.backend.hf.optimized.layers import (
    CosSin,
    OptimizedLayer,
    OptimizedMLP,
    OptimizedNorm,
)
from asyncspec.backend.hf.probing import noise

_PROBE_NUMBERS = 64

_TOLERANCE = 1e-6
"""Relative to the largest number, of an activation."""


class UnknownPart(Exception):
    """A layer has a part that is not computed here."""


class ArrayNorm:
    """An ``OptimizedNorm``."""

    def __init__(self, norm: OptimizedNorm) -> None:
        # x / sqrt(mean of squares + epsilon), by the sum of squares in place of their mean.
        width = len(norm.factors)
        self._factors = (norm.factors.double() * math.sqrt(width)).float().numpy()
        self._epsilon = np.float32(norm.epsilon * width)

    def __call__(self, x: Array, out: Array) -> None:
        """x [..., W] -> ``out`` [..., W], which may be ``x``."""
        # Not ``sum``, which is Python.
        scale = np.add.reduce(x * x, -1, keepdims=True)
        scale += self._epsilon
        np.divide(x, np.sqrt(scale, out=scale), out=out)
        out *= self._factors


def array_norm(norm: nn.Module) -> ArrayNorm | None:
    """None for no norm."""
    if isinstance(norm, nn.Identity):
        return None
    if not isinstance(norm, OptimizedNorm):
        raise UnknownPart
    return ArrayNorm(norm)


class ArrayLinear:
    """A ``HalfLinear`` of float32 rows; ``linears`` is it alone."""

    def __init__(self, *linears: Any) -> None:
        linear = linears[0]
        if len(linears) > 1 or not isinstance(linear, HalfLinear) or linear.dtype != torch.float32:
            raise UnknownPart
        self._linear = linear
        self._bias = None if linear.bias is None else linear.bias.numpy()

    def padded(self, rows: int) -> Array:
        """Zeros for the rows of a product, and for those that are computed beside them."""
        return np.zeros((self._linear.computed_rows(rows), self._linear.in_features), np.float32)

    def __call__(self, x: Array, rows: int) -> Array:
        """x [padded, K] -> [rows, N]."""
        # All products first: what follows one finds no code in the caches.
        parts = [y.numpy()[:rows] for y in self._linear.parts(torch.from_numpy(x))]
        y = parts[0] if len(parts) == 1 else np.concatenate(parts, 1)
        if self._bias is not None:
            y += self._bias
        return y


class ArrayLayer(nn.Module):
    """Computes what an ``OptimizedLayer`` does. Raises ``UnknownPart``."""

    def __init__(self, layer: OptimizedLayer) -> None:
        super().__init__()
        attention, mlp = layer.attention, layer.mlp
        if not isinstance(mlp, OptimizedMLP) or not _is_silu(mlp.activation):
            raise UnknownPart
        if attention.clip is not None:
            raise UnknownPart
        # Kept, so that its memory counts as the shard's. What a pass reads stands beside it: to
        # find a module in a module takes a call.
        self.layer = layer
        self._params, self._width = attention.params, attention.width
        self._has_rotary = attention.has_rotary
        self._inputs, self._output = ArrayLinear(*attention.inputs), ArrayLinear(attention.o_proj)
        self._gates, self._down = ArrayLinear(*mlp.inputs), ArrayLinear(mlp.down_proj)
        self._norms = [array_norm(norm) for norm in layer.norms]
        self._norms_heads = attention.norms_heads
        self._head_norms = [array_norm(norm) for norm in attention.norms]
        queries, keys, _ = (size // attention.width for size in attention.sizes)
        # Ends of query and key heads among all.
        self._ends = queries, queries + keys
        self._scale = None if layer.scale == 1 else np.float32(layer.scale)

    def forward(self, hidden: Tensor, cos_sin: CosSin, tree: TreeMask) -> Tensor:
        """Hidden states [1, n, H] -> [1, n, H]; rows beyond ``tree.count`` repeat the last one."""
        before, after, before_mlp, after_mlp = self._norms
        given, rows = hidden.numpy()[0], tree.count
        x = given[:rows]
        attended = self._attended(self._normed(before, x, self._inputs), cos_sin, tree)
        middle = self._add(self._output(attended, rows), after, x)
        gated = self._gated(self._normed(before_mlp, middle, self._gates), rows)
        out = self._add(self._down(gated, rows), after_mlp, middle)
        if rows < len(given):
            out = np.concatenate([out, out[-1:].repeat(len(given) - rows, 0)])
        return torch.from_numpy(out[None])

    def _attended(self, x: Array, cos_sin: CosSin, tree: TreeMask) -> Array:
        """Normed rows [padded, H] -> output of attention [padded, heads * D]."""
        rows, (queries, keys) = tree.count, self._ends
        heads = self._inputs(x, rows).reshape(rows, -1, self._width)
        query, key, value = heads[:, :queries], heads[:, queries:keys], heads[:, keys:]
        for norm, part in zip(self._head_norms, (query, key), strict=False):
            if norm is not None:
                own = part if self._norms_heads else part.reshape(rows, -1)
                norm(own, own)
        if self._has_rotary:
            rotate(heads[:, :keys], *cos_sin.half_tables)
        out = self._output.padded(rows)
        attended = tree.attend_arrays(self._params, query, key, value)
        out[:rows].reshape(attended.shape)[:] = attended
        return out

    def _gated(self, x: Array, rows: int) -> Array:
        """[padded, H] -> activated gates times the others [padded, F]."""
        out, both = self._down.padded(rows), self._gates(x, rows)
        gate, up = both.reshape(rows, 2, -1).swapaxes(0, 1)
        own = out[:rows]
        with np.errstate(over="ignore"):  # x / infinity is the zero that is wanted
            np.exp(np.negative(gate, out=own), out=own)
            own += np.float32(1)
            np.divide(gate, own, out=own)
            own *= up
        return out

    def _add(self, y: Array, norm: ArrayNorm | None, hidden: Array) -> Array:
        """A block's result [n, H], in place normed, scaled and added to its input."""
        if norm is not None:
            norm(y, y)
        if self._scale is not None:
            y *= self._scale
        y += hidden
        return y

    def _normed(self, norm: ArrayNorm | None, x: Array, product: ArrayLinear) -> Array:
        """Rows [n, H] -> [padded, H], as ``product`` takes them."""
        padded = product.padded(len(x))
        if norm is None:
            padded[: len(x)] = x
        else:
            norm(x, padded[: len(x)])
        return padded


def rotate(x: Array, cos: Array, sin: Array) -> None:
    """As ``apply_rotary`` in place: x [n, heads, D] by cos and sin [at least n, R / 2]."""
    count, heads, _ = x.shape
    half = cos.shape[1]
    cos, sin = (each[:count].reshape(count, 1, 1, half) for each in (cos, sin))
    pairs = x[..., : 2 * half].reshape(count, heads, 2, half)
    # The other half of each number's pair.
    other = pairs[:, :, ::-1] * sin
    pairs *= cos
    pairs[:, :, 0] -= other[:, :, 0]
    pairs[:, :, 1] += other[:, :, 1]


def _is_silu(function: Any) -> bool:
    x = noise(1, _PROBE_NUMBERS)
    want = torch.nn.functional.silu(x)
    return bool((function(x.clone()) - want).abs().max() <= _TOLERANCE * want.abs().max())


def array_layer(layer: OptimizedLayer) -> ArrayLayer | None:
    """None where it has other parts."""
    try:
        return ArrayLayer(layer)
    except UnknownPart:
        return None
