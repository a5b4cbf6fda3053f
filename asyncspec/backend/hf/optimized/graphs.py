"""Which operation of onnxruntime's a family's activation function is: found by trying."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct
from torch import nn

from asyncspec.backend.hf.attention import Tree
from asyncspec.backend.hf.kernels.cpu.linear import RowwiseLinear
from asyncspec.backend.hf.kernels.cpu.mapped import MappedLinear
from asyncspec.backend.hf.kernels.cpu.ort import CONTRIB, Graph, GraphError
from asyncspec.backend.hf.optimized.layers import (
    LeanAttention,
    LeanBlock,
    LeanBody,
    LeanLayer,
    LeanNorm,
    Listening,
    Turns,
)
from asyncspec.backend.hf.probing import noise
from asyncspec.backend.hf.process import HeapTrimmer

_X = "x"
_COUNT = 4096
_CLOSE = 3e-6
"""Of the largest number. The two kinds of GELU are a hundred times as far apart."""


class Activation(Struct, frozen=True):
    """An operator."""

    operator: str
    attributes: Mapping[str, Any]

    def added(self, graph: Graph, x: str) -> str:
        """Its result in a graph."""
        return graph.add(self.operator, x, domain=CONTRIB, **self.attributes)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Its result. Raises ``GraphError``."""
        graph = Graph()
        run = graph.made([self.added(graph, _X)], [_X])
        return torch.from_numpy(run({_X: x.numpy()})[0])


_KNOWN = (
    Activation("QuickGelu", {"alpha": 1.0}),  # SiLU, by another name
    Activation("FastGelu", {}),
    Activation("Gelu", {}),
)


def known_activation(function: Callable[[torch.Tensor], torch.Tensor]) -> Activation | None:
    """The operator that does what ``function`` does, if there is one."""
    x = noise(1, _COUNT)
    want = function(x.clone())
    for activation in _KNOWN:
        try:
            got = activation.of(x)
        except GraphError:
            continue
        if close(got, want, _CLOSE):
            return activation
    return None


def close(got: torch.Tensor, want: torch.Tensor, share: float) -> bool:
    """Whether no number differs by more than a share of the largest."""
    return bool((got - want).abs().max() <= share * want.abs().max())


# --- The two halves of a decoder layer as graphs of onnxruntime: what comes before attention over
# the tree, and what comes after it.
# Behind a product that has read megabytes of weights any further operation finds the caches full
# of them: torch's norms, activations and sums then take ten times what they take in a loop. A
# graph's take little code, and none of Python's.

_HIDDEN, _MIXED = "hidden", "mixed"
_POSITIONS, _COS, _SIN = "positions", "cos", "sin"


class Half(RowwiseLinear):
    """Rows in, rows out, and each depends on its own row alone. Packed, as a linear layer is."""

    any_rows = True

    def __init__(self, width: int, height: int, graph: Graph) -> None:
        super().__init__((height, width), torch.float32, None, 1)
        self._weight_bytes = graph.weight_bytes

    @property
    def kind(self) -> type[RowwiseLinear]:
        """See ``RowwiseLinear``. A pass goes through both halves."""
        return Half

    @property
    def weight_bytes(self) -> int:
        """See ``RowwiseLinear``. Norms and biases are among them."""
        return self._weight_bytes

    @property
    def weight_count(self) -> int:
        """See ``RowwiseLinear``."""
        return self._weight_bytes // self.dtype.itemsize


class Before(Half):
    """Hidden states to queries, keys and values, turned to their positions; ``turned`` is the width
    of cos and sin. Raises ``GraphError``."""

    def __init__(self, layer: LeanLayer, turned: int) -> None:
        attention = layer.attention
        graph = Graph()
        x = _normed(graph, _HIDDEN, layer.norms[0])
        heads = _heads(graph, x, attention)
        self._turned = turned if attention.turns else 0
        if self._turned:
            sizes = attention.sizes
            for i in range(2):
                heads[i] = _turned(graph, heads[i], sizes[i], attention.width, turned)
        ends = ([_HIDDEN, _COS, _SIN], [_POSITIONS]) if self._turned else ([_HIDDEN],)
        super().__init__(_matrix(attention.inputs[0]).in_features, sum(attention.sizes), graph)
        self._run = graph.made(heads, *ends)

    def heads(self, hidden: torch.Tensor, turns: Turns) -> list[torch.Tensor]:
        """Hidden states [1, n, H] -> query, key and value [1, n, heads * D]."""
        given: dict[str, npt.NDArray[Any]] = {_HIDDEN: hidden.numpy()}
        if self._turned:
            # A rotary embedding in onnxruntime looks positions up; ours are looked up already.
            given[_POSITIONS] = np.arange(hidden.shape[1])[None]
            given[_COS], given[_SIN] = turns.halves
        return [torch.from_numpy(part) for part in self._run(given)]

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """See ``RowwiseLinear``. Turned by nothing."""
        rows = x.view(1, -1, self.in_features)
        turns = torch.ones(rows.shape[1], 1, self._turned)
        parts = self.heads(rows, Turns((turns, torch.zeros_like(turns))))
        return torch.cat(parts, -1).view(*x.shape[:-1], self.out_features)


class After(Half):
    """What attention has mixed, and the hidden states before it, to those behind the layer, whose
    ``block`` has this ``activation``. Raises ``GraphError``."""

    def __init__(self, layer: LeanLayer, block: LeanBlock, activation: Activation) -> None:
        _, after, before_block, after_block = layer.norms
        graph = Graph()
        out = _product(graph, _MIXED, layer.attention.o_proj)
        hidden = _added(graph, _normed(graph, out, after), _HIDDEN, layer.scale)
        x = _normed(graph, hidden, before_block)
        gate, up = _split_product(graph, x, list(block.inputs), 2)
        out = graph.add("Mul", activation.added(graph, gate), up)
        out = _normed(graph, _product(graph, out, block.down_proj), after_block)
        out = _added(graph, out, hidden, layer.scale)
        projection = _matrix(layer.attention.o_proj)
        self._mixed = projection.in_features
        height = projection.out_features
        super().__init__(self._mixed + height, height, graph)
        self._run = graph.made([out], [_MIXED, _HIDDEN])

    def hidden(self, mixed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What attention has mixed [1, n, heads * D], hidden states [1, n, H] -> [1, n, H]."""
        (out,) = self._run({_MIXED: mixed.numpy(), _HIDDEN: hidden.numpy()})
        return torch.from_numpy(out)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """See ``RowwiseLinear``. Of both, side by side."""
        rows = x.view(1, -1, self.in_features)
        mixed, hidden = rows.split_with_sizes([self._mixed, self.out_features], -1)
        out = self.hidden(mixed.contiguous(), hidden.contiguous())
        return out.view(*x.shape[:-1], self.out_features)


def _matrix(module: Any) -> MappedLinear:
    if not isinstance(module, MappedLinear):
        raise GraphError
    return module


def _product(graph: Graph, x: str, module: Any) -> str:
    matrix = _matrix(module)
    return graph.product(x, matrix.weight, matrix.bias)


def _split_product(graph: Graph, x: str, parts: Sequence[Any], count: int) -> list[str]:
    """Products by ``count`` matrices, or by one that has equal parts of them below each other."""
    products = [_product(graph, x, part) for part in parts]
    if len(products) == count:
        return products
    sizes = [parts[0].out_features // count] * count
    return _split(graph, products[0], sizes)


def _split(graph: Graph, x: str, sizes: Sequence[int]) -> list[str]:
    return graph.add_several("Split", x, graph.integers(*sizes), count=len(sizes), axis=-1)


def _normed(graph: Graph, x: str, norm: nn.Module) -> str:
    """An RMS norm of a row, or none."""
    if isinstance(norm, nn.Identity):
        return x
    if not isinstance(norm, LeanNorm):
        raise GraphError
    weight = graph.weight(norm.factors)
    return graph.add("SimplifiedLayerNormalization", x, weight, axis=-1, epsilon=norm.epsilon)


def _heads(graph: Graph, x: str, attention: LeanAttention) -> list[str]:
    """Query, key and value [1, n, heads * D], as ``LeanAttention`` makes them."""
    products = [_product(graph, x, part) for part in attention.inputs]
    if len(products) == 1:
        products = _split(graph, products[0], attention.sizes)
    if attention.norms and not attention.norms_heads:
        products[:2] = map(_normed, (graph,) * 2, products, attention.norms)
    if attention.clip is not None:
        least, most = (graph.weight(torch.tensor(x)) for x in (-attention.clip, attention.clip))
        products = [graph.add("Clip", part, least, most) for part in products]
    if attention.norms_heads:
        for i, norm in enumerate(attention.norms):
            split = graph.integers(0, 0, -1, attention.width)
            parts = _normed(graph, graph.add("Reshape", products[i], split), norm)
            products[i] = graph.add("Reshape", parts, graph.integers(0, 0, -1))
    return products


def _turned(graph: Graph, x: str, size: int, width: int, turned: int) -> str:
    """Heads of ``width`` numbers, ``size`` in all; of each the first ``turned`` are turned."""
    # Where all are, it counts the heads itself.
    part = {"rotary_embedding_dim": turned, "num_heads": size // width} if turned < width else {}
    return graph.add("RotaryEmbedding", x, _POSITIONS, _COS, _SIN, domain=CONTRIB, **part)


def _added(graph: Graph, x: str, hidden: str, scale: float) -> str:
    """``x``, scaled as a family's residual stream wants it, to the hidden states."""
    if scale != 1:
        x = graph.add("Mul", x, graph.weight(torch.tensor(scale)))
    return graph.add("Add", x, hidden)


# --- Lean layers as two graphs each, where that computes the same.
# The functions of a graph round otherwise than a family's own code. So a fused layer is held to
# the lean one, which had the family's bits: over rows of noise its numbers are the same but for
# rounding, and those of a row have the same bits alone and among others.

_TOLERANCE = 2e-5
"""Of the largest number: ordinary rounding of float32 sums."""


class FusedLayer(nn.Module):
    """What a lean layer computes. Raises ``GraphError``."""

    def __init__(
        self, layer: LeanLayer, block: LeanBlock, turned: int, activation: Activation
    ) -> None:
        super().__init__()
        self.before = Before(layer, turned)
        self.after = After(layer, block, activation)
        self._asked, self._width = layer.attention.asked, layer.attention.width

    @property
    def weight_bytes(self) -> int:
        """Memory of both graphs' weights, in bytes."""
        return self.before.weight_bytes + self.after.weight_bytes

    def forward(self, hidden: torch.Tensor, turns: Turns, tree: Tree) -> torch.Tensor:
        """Hidden states [1, n, H] -> [1, n, H]."""
        shape = (hidden.shape[1], -1, self._width)
        heads = [part.view(shape).transpose(0, 1) for part in self.before.heads(hidden, turns)]
        mixed = tree.attend(self._asked, *heads)
        return self.after.hidden(mixed.flatten(1).unsqueeze(0), hidden)


def fuse(body: LeanBody, width: int, positions: torch.Tensor) -> None:
    """Exchange the layers of ``body``, of ``width`` hidden numbers, whose weights lie in a file,
    where the fused ones compute the same of rows at these ``positions`` [n]."""
    hidden = noise(1, len(positions), width)
    turns = body.turns(hidden, positions.unsqueeze(0))
    known: dict[str, Activation | None] = {}
    freed = HeapTrimmer()
    for i, layer in enumerate(body.layers):
        assert isinstance(layer, LeanLayer)
        fused = _fused(layer, turns[i][0].shape[-1], known)
        if fused is not None and _does_the_same(fused, layer, hidden, turns[i]):
            body.layers[i] = fused
            # Packing leaves as much behind as it packs.
            freed.add(fused.weight_bytes)


def _fused(layer: LeanLayer, turned: int, known: dict[str, Activation | None]) -> FusedLayer | None:
    block = layer.block
    if not isinstance(block, LeanBlock):
        return None
    name = repr(block.activation)
    if name not in known:
        known[name] = known_activation(block.activation)
    activation = known[name]
    try:
        return None if activation is None else FusedLayer(layer, block, turned, activation)
    except GraphError:
        return None


def _does_the_same(fused: FusedLayer, layer: LeanLayer, hidden: torch.Tensor, turns: Turns) -> bool:
    try:
        got = _heard(fused, hidden, turns)
        alone = _heard(fused, hidden[:, :1], Turns(x[:1] for x in turns))
    except GraphError:
        return False
    want = _heard(layer, hidden, turns)
    if not all(close(*pair, _TOLERANCE) for pair in zip(got, want, strict=True)):
        return False
    return all(torch.equal(x, among[..., :1, :]) for x, among in zip(alone, got, strict=True))


def _heard(layer: LeanLayer | FusedLayer, hidden: torch.Tensor, turns: Turns) -> list[torch.Tensor]:
    """Query, key and value [heads, n, D] and result [1, n, H] of a layer."""
    tree = Listening(hidden.shape[1])
    out = layer(hidden, turns, tree)
    return [*tree.heard, out]
