"""Optimized layers as two onnxruntime graphs each: before and after attention.

Behind a product that has read megabytes of weights, torch's norms, activations and sums find the
caches cold and take ten times as long; a graph needs little code, and no Python. Its functions
round otherwise than torch's, so a fused layer must agree with the optimized one on rows of noise
up to rounding, and a row must have the same bits alone and among others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from asyncspec.plugins.hf.attention.attention import Array, TreeMask
from asyncspec.plugins.hf.kernels.cpu.linear import AND, RowwiseLinear
from asyncspec.plugins.hf.kernels.cpu.ort import CONTRIB, Graph, GraphError, WaitingLinear
from asyncspec.plugins.hf.kernels.probing import noise
from asyncspec.plugins.hf.kernels.process import free_heap
from asyncspec.plugins.hf.model.optimized.arrays import (
    ArrayLayer,
    LastNorm,
    array_layer,
    run_arrays,
)
from asyncspec.plugins.hf.model.optimized.layers import (
    CosSin,
    OptimizedAttention,
    OptimizedLayer,
    OptimizedMLP,
    OptimizedNorm,
)
from asyncspec.plugins.hf.model.optimized.model import OptimizedModel, RecordingAttention

_PROBE_NUMBERS = 4096  # of noise
_ACTIVATION_TOLERANCE = 3e-6
"""Relative to the largest number. The two kinds of GELU differ by a hundred times as much."""

_ACTIVATIONS: Mapping[str, Mapping[str, float]] = {
    "QuickGelu": {"alpha": 1.0},  # SiLU, by another name
    "FastGelu": {},
    "Gelu": {},
}
"""onnxruntime's operators for activation functions, and their attributes."""


def _activate(graph: Graph, operator: str, x: str) -> str:
    return graph.add(operator, x, domain=CONTRIB, **_ACTIVATIONS.get(operator, {}))


def known_activation(function: Callable[[Tensor], Tensor]) -> str | None:
    """The operator that computes ``function`` on noise."""
    x = noise(1, _PROBE_NUMBERS)
    want = function(x.clone())
    for operator in _ACTIVATIONS:
        graph = Graph()
        with suppress(GraphError):
            (got,) = graph.compile([_activate(graph, operator, "x")], ["x"])({"x": x.numpy()})
            if close(torch.from_numpy(got), want, _ACTIVATION_TOLERANCE):
                return operator
    return None


def close(got: Tensor, want: Tensor, tolerance: float) -> bool:
    """Whether no number differs by more than a share of the largest."""
    return bool((got - want).abs().max() <= tolerance * want.abs().max())


_HIDDEN, _ATTENDED = "hidden", "attended"
_POSITIONS, _COS, _SIN = "positions", "cos", "sin"


class LayerGraph(RowwiseLinear):
    """A part of a layer in float32. As in a linear layer an output row depends on its input row
    alone."""

    any_rows = True

    def __init__(
        self, width: int, height: int, graph: Graph, matrices: Iterable[WaitingLinear]
    ) -> None:
        super().__init__((height, width), torch.float32, None, 1)
        self._weight_bytes = graph.weight_bytes
        self._description = AND.join(sorted({x.description for x in matrices}))
        self.row_multiple = max(x.row_multiple for x in matrices)

    def unrounded_product(self, x: Tensor) -> Tensor:
        return self.in_padded_rows(self.product, x)

    @property
    def description(self) -> str:
        return self._description

    @property
    def weight_bytes(self) -> int:
        """Includes norms and biases."""
        return self._weight_bytes


class PreAttentionGraph(LayerGraph):
    """Hidden states to rotated queries, keys and values. Raises ``GraphError``."""

    def __init__(self, layer: OptimizedLayer, rotary_width: int) -> None:
        attention = layer.attention
        graph = Graph()
        x = _norm(graph, _HIDDEN, layer.norms[0])
        heads = _heads(graph, x, attention)
        self._rotary_width = rotary_width if attention.has_rotary else 0
        if self._rotary_width:
            for i, size in enumerate(attention.sizes[:2]):
                heads[i] = _rotary(graph, heads[i], size, attention.width, rotary_width)
        ends = ([_HIDDEN, _COS, _SIN], [_POSITIONS]) if self._rotary_width else ([_HIDDEN],)
        matrices = [_matrix(part) for part in attention.inputs]
        super().__init__(matrices[0].in_features, sum(attention.sizes), graph, matrices)
        self._run = graph.compile(heads, *ends)

    def heads(self, hidden: Tensor, cos_sin: CosSin) -> Sequence[Array]:
        """Hidden states [1, n, H] -> query, key and value [1, n, heads * D] float32."""
        inputs: dict[str, npt.NDArray[Any]] = {_HIDDEN: hidden.float().numpy()}
        if self._rotary_width:
            # onnxruntime looks positions up in cos and sin; here row i is position i already.
            inputs[_POSITIONS] = np.arange(hidden.shape[1])[None]
            inputs[_COS], inputs[_SIN] = cos_sin.half_tables
        return self._run(inputs)

    def product(self, x: Tensor) -> Tensor:
        """Queries, keys and values side by side, not rotated."""
        rows = x.view(1, -1, self.in_features)
        cos = torch.ones(rows.shape[1], 1, self._rotary_width)
        parts = self.heads(rows, CosSin(cos, torch.zeros_like(cos)))
        joined = torch.from_numpy(np.concatenate(parts, -1)).to(x.dtype)
        return joined.view(*x.shape[:-1], self.out_features)


class PostAttentionGraph(LayerGraph):
    """Output of attention and the layer's input to its output. Raises ``GraphError``."""

    def __init__(self, layer: OptimizedLayer, activation: str) -> None:
        mlp, (_, after, before_mlp, after_mlp) = layer.mlp, layer.norms
        assert isinstance(mlp, OptimizedMLP)
        graph = Graph()
        out = _product(graph, _ATTENDED, layer.attention.o_proj)
        hidden = _add_residual(graph, _norm(graph, out, after), _HIDDEN, layer.scale)
        x = _norm(graph, hidden, before_mlp)
        gate, up = _split_product(graph, x, mlp.inputs, [_matrix(mlp.down_proj).in_features] * 2)
        out = graph.add("Mul", _activate(graph, activation, gate), up)
        out = _norm(graph, _product(graph, out, mlp.down_proj), after_mlp)
        out = _add_residual(graph, out, hidden, layer.scale)
        projection = _matrix(layer.attention.o_proj)
        self._attended = projection.in_features
        height = projection.out_features
        matrices = [projection, *map(_matrix, (*mlp.inputs, mlp.down_proj))]
        super().__init__(self._attended + height, height, graph, matrices)
        self._run = graph.compile([out], [_ATTENDED, _HIDDEN])

    def hidden(self, attended: Array, hidden: Tensor) -> Tensor:
        """Output of attention [1, n, heads * D], hidden states [1, n, H] -> [1, n, H]."""
        inputs = {_ATTENDED: attended, _HIDDEN: hidden.float().numpy()}
        (out,) = self._run(inputs)
        return torch.from_numpy(out).to(hidden.dtype)

    def product(self, x: Tensor) -> Tensor:
        """Product with both inputs side by side."""
        rows = x.view(1, -1, self.in_features)
        attended, hidden = rows.split_with_sizes([self._attended, self.out_features], -1)
        out = self.hidden(attended.float().contiguous().numpy(), hidden.contiguous())
        return out.view(*x.shape[:-1], self.out_features)


def _matrix(module: Any) -> WaitingLinear:
    if not isinstance(module, WaitingLinear):
        raise GraphError
    return module


def _product(graph: Graph, x: str, module: Any) -> str:
    return _matrix(module).add_to(graph, x)


def _split_product(graph: Graph, x: str, parts: nn.ModuleList, sizes: Sequence[int]) -> list[str]:
    """Products of ``sizes`` columns by a matrix each, or by one that stacks them."""
    products = [_product(graph, x, part) for part in parts]
    if len(products) == 1:
        stacked, ends = products[0], graph.integers(*sizes)
        return graph.add_several("Split", stacked, ends, count=len(sizes), axis=-1)
    return products


def _norm(graph: Graph, x: str, norm: nn.Module) -> str:
    """RMS norm of rows, or ``x`` where there is no norm."""
    if isinstance(norm, nn.Identity):
        return x
    if not isinstance(norm, OptimizedNorm):
        raise GraphError
    weight = graph.weight(norm.factors.float())
    return graph.add("SimplifiedLayerNormalization", x, weight, axis=-1, epsilon=norm.epsilon)


def _heads(graph: Graph, x: str, attention: OptimizedAttention) -> list[str]:
    """Query, key and value [1, n, heads * D], as in ``OptimizedAttention``."""
    products = _split_product(graph, x, attention.inputs, attention.sizes)
    for i, norm in enumerate(attention.norms):
        if attention.norms_heads:
            shape = graph.integers(0, 0, -1, attention.width)
            parts = _norm(graph, graph.add("Reshape", products[i], shape), norm)
            products[i] = graph.add("Reshape", parts, graph.integers(0, 0, -1))
        else:
            products[i] = _norm(graph, products[i], norm)
    if attention.clip is not None:
        low, high = (graph.weight(torch.tensor(x)) for x in (-attention.clip, attention.clip))
        products = [graph.add("Clip", part, low, high) for part in products]
    return products


def _rotary(graph: Graph, x: str, size: int, width: int, rotary_width: int) -> str:
    """Heads of ``width`` numbers, ``size`` in all, with the first ``rotary_width`` rotated."""
    # Where all are, the operator counts the heads itself.
    partial = {"rotary_embedding_dim": rotary_width, "num_heads": size // width}
    attributes = partial if rotary_width < width else {}
    return graph.add("RotaryEmbedding", x, _POSITIONS, _COS, _SIN, domain=CONTRIB, **attributes)


def _add_residual(graph: Graph, x: str, hidden: str, scale: float) -> str:
    if scale != 1:
        x = graph.add("Mul", x, graph.weight(torch.tensor(scale)))
    return graph.add("Add", x, hidden)


# --- Fused layers.

_LAYER_TOLERANCE = 2e-5
"""Relative to the largest number: rounding of float32 sums."""

_ROUNDED_TOLERANCE = 0.05
"""Where inputs of products are rounded to 8 bits."""


class FusedLayer(nn.Module):
    """Computes what an ``OptimizedLayer`` does. Raises ``GraphError``."""

    def __init__(self, layer: OptimizedLayer, rotary_width: int, activation: str) -> None:
        super().__init__()
        self.before = PreAttentionGraph(layer, rotary_width)
        self.after = PostAttentionGraph(layer, activation)
        self._params, self._width = layer.attention.params, layer.attention.width

    def forward(self, hidden: Tensor, cos_sin: CosSin, tree: TreeMask) -> Tensor:
        """Hidden states [1, n, H] -> [1, n, H]."""
        rows = hidden.shape[1]
        parts = self.before.heads(hidden, cos_sin)
        heads = [part.reshape(rows, -1, self._width) for part in parts]
        if hidden.dtype == torch.float32:
            query, key, value = heads
            attended = np.empty((*query.shape[:2], value.shape[2]), np.float32)
            tree.attend_arrays(self._params, query, key, value, attended)
        else:
            parts_of_heads = (torch.from_numpy(x).to(hidden.dtype).transpose(0, 1) for x in heads)
            attended = tree.attend(self._params, *parts_of_heads).float().numpy()
        return self.after.hidden(attended.reshape(1, rows, -1), hidden)


def fuse_layers(body: OptimizedModel, width: int, dtype: torch.dtype, positions: Tensor) -> None:
    """Replace those layers of ``body``, for rows of ``dtype`` of hidden size ``width``, whose form
    as graphs, where weights wait to be packed, or by numpy agrees with them at these ``positions``
    [n]."""
    hidden = noise(1, len(positions), width).to(dtype)
    cos_sin = body.cos_sin(hidden, positions.unsqueeze(0))
    activations: dict[str, str | None] = {}
    for i, layer in enumerate(body.layers):
        assert isinstance(layer, OptimizedLayer)
        layer.stack_inputs()
        if not isinstance(layer.mlp, OptimizedMLP):
            continue
        if not isinstance(layer.mlp.down_proj, WaitingLinear):
            # Nor do the others wait: onnxruntime is not imported for nothing.
            arrays = array_layer(layer)
            if arrays is not None and _agrees(arrays, layer, hidden, cos_sin[i], 1):
                body.layers[i] = arrays
            continue
        name = repr(layer.mlp.activation)
        if name not in activations:
            activations[name] = known_activation(layer.mlp.activation)
        fused = _fused(layer, activations[name], hidden, cos_sin[i])
        if fused is not None:
            body.layers[i] = fused
            # Packing frees as much as it packs.
            free_heap(fused.before.weight_bytes + fused.after.weight_bytes)
    if all(isinstance(layer, ArrayLayer) for layer in body.layers):
        body.run_layers = run_arrays
        if isinstance(body.norm, OptimizedNorm):
            body.norm = LastNorm(body.norm)


def _fused(
    layer: OptimizedLayer, activation: str | None, hidden: Tensor, cos_sin: CosSin
) -> FusedLayer | None:
    """None where graphs cannot compute the layer or results differ."""
    if activation is None:
        return None
    try:
        fused = FusedLayer(layer, cos_sin.tensors[0].shape[-1], activation)
        few = fused.before.computed_rows(1)
        return fused if _agrees(fused, layer, hidden, cos_sin, few) else None
    except GraphError:
        return None


def _agrees(
    ours: FusedLayer | ArrayLayer, layer: OptimizedLayer, hidden: Tensor, cos_sin: CosSin, few: int
) -> bool:
    """Whether results are those of ``layer`` up to rounding, and those of the ``few`` first rows,
    the least that are computed, what they are among the others."""
    got, want = (_intermediates(one, hidden, cos_sin) for one in (ours, layer))
    cos, sin = (x[:few] for x in cos_sin)
    alone = _intermediates(ours, hidden[:, :few], CosSin(cos, sin))
    tolerance = _LAYER_TOLERANCE if few == 1 else _ROUNDED_TOLERANCE
    rowwise = all(torch.equal(x, y[..., :few, :]) for x, y in zip(alone, got, strict=True))
    return rowwise and all(close(*pair, tolerance) for pair in zip(got, want, strict=True))


def _intermediates(
    layer: OptimizedLayer | FusedLayer | ArrayLayer, hidden: Tensor, cos_sin: CosSin
) -> list[Tensor]:
    """Query, key and value [heads, n, D] and result [1, n, H] of a layer."""
    tree = RecordingAttention(hidden.shape[1])
    out = layer(hidden, cos_sin, tree)
    return [*tree.inputs, out]
