"""Optimized layers of float32 rows and float16 weights, by numpy between FBGEMM's products.

Behind a product that has read megabytes of weights, no cache holds the code of torch's operations,
and each takes ten times as long as in a loop; numpy's take a third of that. Sums of squares and
exponentials round otherwise than torch's, so such a layer is compared like a graph (``graphs.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from asyncspec.backend.tree_stage import Abandoned
from asyncspec.plugins.hf.attention.attention import Array, TreeMask
from asyncspec.plugins.hf.kernels.cpu.half_precision import HalfLinear
from asyncspec.plugins.hf.kernels.cpu.linear import pad_rows
from asyncspec.plugins.hf.kernels.probing import noise
from asyncspec.plugins.hf.model.optimized.layers import (
    CosSin,
    OptimizedLayer,
    OptimizedMLP,
    OptimizedNorm,
)
from asyncspec.plugins.hf.model.optimized.model import is_hooked, run_in_turn

_PROBE_NUMBERS = 64

_TOLERANCE = 1e-6
"""Relative to the largest number, of an activation."""


_ONE = np.float32(1)


class UnknownPart(Exception):
    """A layer has a part that is not computed here."""


class ArrayNorm:
    """An ``OptimizedNorm``."""

    def __init__(self, norm: OptimizedNorm) -> None:
        # x / sqrt(mean of squares + epsilon), by the sum of squares in place of their mean.
        width = len(norm.factors)
        self._factors = (norm.factors.double() * math.sqrt(width)).float().numpy()
        self._epsilon = norm.epsilon * width

    def __call__(self, x: Array, out: Array) -> None:
        """x [..., W] -> ``out`` [..., W], which may be ``x``."""
        if x.size == x.shape[-1]:
            # The same numbers by Python's, in half of numpy's functions.
            row = x.reshape(-1)
            np.multiply(x, 1 / math.sqrt(float(row.dot(row)) + self._epsilon), out=out)
        else:
            squares = np.matmul(x[..., None, :], x[..., None])[..., 0]
            scale = 1 / np.sqrt(squares.astype(np.float64) + self._epsilon)
            np.multiply(x, scale.astype(np.float32), out=out)
        out *= self._factors


def array_norm(norm: nn.Module) -> ArrayNorm | None:
    """None for no norm."""
    if isinstance(norm, nn.Identity):
        return None
    if not isinstance(norm, OptimizedNorm):
        raise UnknownPart
    return ArrayNorm(norm)


class LastNorm(nn.Module):
    """The norm behind the layers, by numpy."""

    def __init__(self, norm: OptimizedNorm) -> None:
        super().__init__()
        self.norm = norm  # its memory counts as the shard's
        self._own = ArrayNorm(norm)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [..., W] -> [..., W]."""
        rows = x.numpy()
        out = np.empty_like(rows)
        self._own(rows, out)
        return torch.from_numpy(out)


class ArrayLinear:
    """A ``HalfLinear`` of float32 rows; ``linears`` is it alone."""

    def __init__(self, *linears: Any) -> None:
        linear = linears[0]
        if len(linears) > 1 or not isinstance(linear, HalfLinear) or linear.dtype != torch.float32:
            raise UnknownPart
        self.linear = linear
        self.bias = None if linear.bias is None else linear.bias.numpy()

    def product(self, rows: int, parts: int = 1) -> Product:
        """Its product of ``rows`` rows, in ``parts`` of as many columns each."""
        return Product(self, rows, parts)


class Product:
    """A product of [rows, K], which it finds in ``x``, whose results [rows, N / parts] it writes to
    ``y``. Arrays and what looks at them are made once for passes of as many rows."""

    def __init__(self, layer: ArrayLinear, rows: int, parts: int) -> None:
        linear, bias = layer.linear, layer.bias
        height, computed = linear.out_features, linear.computed_rows(rows)
        # Zeros in rows that are computed beside those of the pass.
        inputs = np.zeros((computed, linear.in_features), np.float32)
        heights = [each.height for each in linear.slices]
        sums = [np.empty((computed, each), np.float32) for each in heights]
        self.x = inputs[:rows]
        self._parts = [each[:rows] for each in sums]
        joins = heights != [height // parts] * parts
        copies = joins and len(sums) > 1
        self._joined = np.empty((rows, height), np.float32) if copies else None
        whole = self._parts[0] if self._joined is None else self._joined
        self.y = np.split(whole, parts, 1) if joins else self._parts
        biases = [] if bias is None else np.split(bias, parts)
        self._biases = [*zip(self.y, biases, strict=False)]
        with torch.inference_mode(mode=False):  # else they could be written to inside alone
            rows_read = torch.from_numpy(inputs)
            self._multiply = [
                partial(each.write, rows_read, torch.from_numpy(out))
                for each, out in zip(linear.slices, sums, strict=True)
            ]

    def run(self, stop: Callable[[], bool]) -> Array:
        """The first of the results. Raises ``Abandoned`` where ``stop`` says so before a part:
        a pass of few layers whose rows are dead would end late with a check a layer."""
        for multiply in self._multiply:
            if stop():
                raise Abandoned
            multiply()
        if self._joined is not None:
            np.concatenate(self._parts, 1, out=self._joined)
        for y, bias in self._biases:
            y += bias
        return self.y[0]


class Products:
    """Those of a layer for passes of ``rows`` rows, and what is between them."""

    def __init__(self, layer: ArrayLayer, rows: int) -> None:
        self.inputs, self.output = layer.inputs.product(rows), layer.output.product(rows)
        self.gates, self.down = layer.gates.product(rows, 2), layer.down.product(rows)
        heads, (queries, keys) = self.inputs.y[0].reshape(rows, -1, layer.width), layer.ends
        self.query, self.key = heads[:, :queries], heads[:, queries:keys]
        self.value, self.rotated = heads[:, keys:], heads[:, :keys]
        self.attended = self.output.x.reshape(rows, queries, -1)


_KEPT_ROWS = 16
"""Most rows of a pass whose arrays are kept for the next one."""


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
        self._params, self.width = attention.params, attention.width
        self._has_rotary = attention.has_rotary
        self.inputs, self.output = ArrayLinear(*attention.inputs), ArrayLinear(attention.o_proj)
        self.gates, self.down = ArrayLinear(*mlp.inputs), ArrayLinear(mlp.down_proj)
        before_attention, self._after, before_mlp, self._after_mlp = map(array_norm, layer.norms)
        self._before, self._before_mlp = before_attention or _copy, before_mlp or _copy
        self._norms_heads = attention.norms_heads
        self._head_norms = [array_norm(norm) for norm in attention.norms]
        queries, keys, _ = (size // attention.width for size in attention.sizes)
        # Ends of query and key heads among all.
        self.ends = queries, queries + keys
        self._scale = None if layer.scale == 1 else np.float32(layer.scale)
        # Number of rows and arrays of the last pass of few rows.
        self._products: tuple[int, Products | None] = 0, None

    def forward(self, hidden: Tensor, cos_sin: CosSin, tree: TreeMask) -> Tensor:
        """Hidden states [1, n, H] -> [1, n, H]; rows beyond ``tree.count`` repeat the last one."""
        with np.errstate(over="ignore"):
            out = self.rows(hidden.numpy()[0, : tree.count], cos_sin, tree)
        return pad_rows(torch.from_numpy(out), hidden.shape[1]).unsqueeze(0)

    def rows(self, x: Array, cos_sin: CosSin, tree: TreeMask) -> Array:
        """Hidden states [n, H] of the rows of ``tree`` -> [n, H]."""
        made = self._products_of(len(x))
        self._before(x, made.inputs.x)
        made.inputs.run(tree.stop)
        self._attend(made, cos_sin, tree)
        middle = made.output.run(tree.stop)
        self._finish(middle, self._after)
        middle += x
        self._before_mlp(middle, made.gates.x)
        made.gates.run(tree.stop)
        gate, up = made.gates.y
        multiply_silu(gate, up, made.down.x)
        out = made.down.run(tree.stop)
        self._finish(out, self._after_mlp)
        # Not in place: the next pass writes to it.
        return np.add(out, middle)

    def _products_of(self, rows: int) -> Products:
        kept_rows, products = self._products
        if products is None or kept_rows != rows:
            products = Products(self, rows)
            self._products = (rows, products) if rows <= _KEPT_ROWS else (0, None)
        return products

    def _attend(self, made: Products, cos_sin: CosSin, tree: TreeMask) -> None:
        """From product to product."""
        for norm, part in zip(self._head_norms, (made.query, made.key), strict=False):
            if norm is not None:
                heads = part if self._norms_heads else part.reshape(len(part), -1)
                norm(heads, heads)
        if self._has_rotary:
            rotate(made.rotated, *cos_sin.pair_tables)
        tree.attend_arrays(self._params, made.query, made.key, made.value, made.attended)

    def _finish(self, y: Array, norm: ArrayNorm | None) -> None:
        """In place: a block's result [n, H] as it is added to its input."""
        if norm is not None:
            norm(y, y)
        if self._scale is not None:
            y *= self._scale


def _copy(x: Array, out: Array) -> None:
    """In place of no norm before a product."""
    out[:] = x


def multiply_silu(gate: Array, up: Array, out: Array) -> None:
    """Activated gates times the others [n, F]."""
    np.exp(np.negative(gate, out=out), out=out)  # x / infinity is the zero that is wanted
    out += _ONE
    np.divide(gate, out, out=out)
    out *= up


def rotate(x: Array, cos: Array, sin: Array) -> None:
    """As ``apply_rotary`` in place: x [n, heads, D] by cos [at least n, 1, 1, R / 2] and sin
    [..., 2, R / 2]."""
    count, heads, _ = x.shape
    half = cos.shape[3]
    pairs = x[..., : 2 * half].reshape(count, heads, 2, half)
    # The other half of each number's pair.
    turned = pairs[:, :, ::-1] * sin[:count]
    pairs *= cos[:count]
    pairs += turned


def run_arrays(
    layers: Sequence[tuple[nn.Module, CosSin]], hidden: Tensor, tree: TreeMask
) -> Tensor:
    """``run_in_turn`` of layers by numpy, whose rows stay there where nobody looks at them."""
    array_layers: Any = layers
    if hidden.shape[1] > tree.count or any(is_hooked(layer) for layer, _ in array_layers):
        return run_in_turn(layers, hidden, tree)
    x = hidden.numpy()[0]
    with np.errstate(over="ignore"):
        for layer, cos_sin in array_layers:
            x = layer.rows(x, cos_sin, tree)
    return torch.from_numpy(x).unsqueeze(0)


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
