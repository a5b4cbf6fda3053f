"""Optimized layers of float32 rows and float16 weights, by numpy between FBGEMM's products.

Behind a product that has read megabytes of weights, no cache holds the code of torch's operations,
and each takes ten times as long as in a loop; numpy's take a third of that. Sums of squares and
exponentials round otherwise than torch's, so such a layer is compared like a graph (``graphs.py``).
"""

from __future__ import annotations

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
        self._factors, self._epsilon = norm.factors.float().numpy(), np.float32(norm.epsilon)

    def __call__(self, x: Array, out: Array | None = None) -> Array:
        """x [..., W] -> [..., W]."""
        # Not ``sum``, which is Python.
        scale = np.add.reduce(x * x, -1, keepdims=True)
        scale /= np.float32(x.shape[-1])
        scale += self._epsilon
        y: Array = np.divide(x, np.sqrt(scale, out=scale), out=out)
        y *= self._factors
        return y


def array_norm(norm: nn.Module) -> ArrayNorm | None:
    """None for no norm."""
    if isinstance(norm, nn.Identity):
        return None
    if not isinstance(norm, OptimizedNorm):
        raise UnknownPart
    return ArrayNorm(norm)


class ArrayLinear:
    """A ``HalfLinear`` of float32 rows."""

    def __init__(self, linear: Any) -> None:
        if not isinstance(linear, HalfLinear) or linear.dtype != torch.float32:
            raise UnknownPart
        self._linear = linear
        self._bias = None if linear.bias is None else linear.bias.numpy()

    def padded(self, rows: int) -> Array:
        """Memory for the rows of a product: those beyond ``rows`` are zeros."""
        computed = self._linear.computed_rows(rows)
        x = np.empty((computed, self._linear.in_features), np.float32)
        x[rows:] = 0
        return x

    def parts(self, x: Array, rows: int) -> list[Array]:
        """x [padded, K] -> [rows, N], in parts of its columns."""
        found = [y.numpy()[:rows] for y in self._linear.parts(torch.from_numpy(x))]
        if self._bias is not None:
            start = 0
            for part in found:
                part += self._bias[start : start + part.shape[1]]
                start += part.shape[1]
        return found

    def __call__(self, x: Array, rows: int) -> Array:
        """As ``parts``, in one array."""
        parts = self.parts(x, rows)
        return parts[0] if len(parts) == 1 else np.concatenate(parts, 1)


class ArrayLayer(nn.Module):
    """Computes what an ``OptimizedLayer`` does. Raises ``UnknownPart``."""

    def __init__(self, layer: OptimizedLayer) -> None:
        super().__init__()
        attention, mlp = layer.attention, layer.mlp
        if not isinstance(mlp, OptimizedMLP) or not _is_silu(mlp.activation):
            raise UnknownPart
        if len(attention.inputs) != 3 or len(mlp.inputs) != 2 or attention.clip is not None:
            raise UnknownPart
        # Kept, so that its memory counts as the shard's.
        self.layer = layer
        self._inputs = [ArrayLinear(part) for part in attention.inputs]
        self._output = ArrayLinear(attention.o_proj)
        self._gate, self._up = (ArrayLinear(part) for part in mlp.inputs)
        self._down = ArrayLinear(mlp.down_proj)
        self._norms = [array_norm(norm) for norm in layer.norms]
        self._head_norms = [array_norm(norm) for norm in attention.norms]
        self._scale = np.float32(layer.scale)

    def forward(self, hidden: Tensor, cos_sin: CosSin, tree: TreeMask) -> Tensor:
        """Hidden states [1, n, H] -> [1, n, H]; rows beyond ``tree.count`` repeat the last one."""
        _, after, before_mlp, after_mlp = self._norms
        x, rows = hidden[0].numpy(), tree.count
        attended = self._attended(x[:rows], cos_sin, tree)
        middle = self._add(self._output(attended, rows), after, x[:rows], None)
        gated = self._gated(self._normed(before_mlp, middle, self._gate), rows)
        y = self._down(gated, rows)
        out = np.empty_like(x)
        self._add(y, after_mlp, middle, out[:rows])
        out[rows:] = out[rows - 1]
        return torch.from_numpy(out).unsqueeze(0)

    def _attended(self, x: Array, cos_sin: CosSin, tree: TreeMask) -> Array:
        """Rows [n, H] -> output of attention [padded, heads * D]."""
        attention, rows = self.layer.attention, len(x)
        normed = self._normed(self._norms[0], x, self._inputs[0])
        products = [part(normed, rows) for part in self._inputs]
        for i, norm in enumerate(self._head_norms):
            if norm is not None:
                each = products[i]
                shape = (rows, -1, attention.width) if attention.norms_heads else each.shape
                products[i] = norm(each.reshape(shape))
        query, key, value = (part.reshape(rows, -1, attention.width) for part in products)
        if attention.has_rotary:
            cos, sin = (each.numpy()[:rows] for each in cos_sin)
            query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        out = self._output.padded(rows)
        out[:rows] = tree.attend_arrays(attention.params, query, key, value).reshape(rows, -1)
        return out

    def _gated(self, x: Array, rows: int) -> Array:
        """[padded, H] -> activated gates times the others [padded, F]."""
        out, end = self._down.padded(rows), 0
        with np.errstate(over="ignore"):  # x / infinity is the zero that is wanted
            for gate, up in zip(self._gate.parts(x, rows), self._up.parts(x, rows), strict=True):
                own = out[:rows, end : (end := end + gate.shape[1])]
                np.exp(np.negative(gate, out=own), out=own)
                own += np.float32(1)
                np.divide(gate, own, out=own)
                own *= up
        return out

    def _add(self, y: Array, norm: ArrayNorm | None, hidden: Array, out: Array | None) -> Array:
        """A block's result [n, H], which is overwritten, normed, scaled and added to its input."""
        y = y if norm is None else norm(y)
        if self._scale != 1:
            y *= self._scale
        return np.add(y, hidden, out=y if out is None else out)

    def _normed(self, norm: ArrayNorm | None, x: Array, product: ArrayLinear) -> Array:
        """Rows [n, H] -> [padded, H], as ``product`` takes them."""
        padded = product.padded(len(x))
        if norm is None:
            padded[: len(x)] = x
        else:
            norm(x, padded[: len(x)])
        return padded


def rotated(x: Array, cos: Array, sin: Array) -> Array:
    """As ``apply_rotary``: x [n, heads, D] by cos and sin [n, 1, R]."""
    width = cos.shape[-1]
    split = (*x.shape[:2], 2, width // 2)
    # The other half of each number's pair.
    other = x[..., :width].reshape(split)[:, :, ::-1]
    turned = x[..., :width] * cos
    turned += (other * sin.reshape(len(sin), 1, 2, -1)).reshape(turned.shape)
    return turned if width == x.shape[-1] else np.concatenate([turned, x[..., width:]], -1)


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
