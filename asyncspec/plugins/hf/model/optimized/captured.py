"""Optimized layers on an accelerator as captured graphs, for each bucket of rows
(``kernels/accelerator/graphs.py``): one for all layers where the device has a kernel for attention
over paths, else two for each layer, before and after attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from asyncspec.backend.tree_stage import Abandoned
from asyncspec.plugins.hf.attention.attention import TreeMask
from asyncspec.plugins.hf.attention.batched_attention import PathAttention, PathTable
from asyncspec.plugins.hf.kernels.accelerator.graphs import Captured
from asyncspec.plugins.hf.kernels.accelerator.paths import LEAST_PATH, PathKernel, TableShape
from asyncspec.plugins.hf.kernels.device import Device
from asyncspec.plugins.hf.model.optimized.layers import CosSin, OptimizedLayer, OptimizedMLP
from asyncspec.plugins.hf.model.optimized.model import OptimizedModel, run_in_turn


class Graphs:
    """The graphs of a shard. They are captured by the first pass of each number of rows."""

    def __init__(self, device: Device) -> None:
        self._device = device
        # Numbers of rows that are captured; other passes run operation by operation.
        self.buckets: tuple[int, ...] = ()
        # Why a capture failed, after which there are none; "" where none did.
        self.failure = ""
        self._shared: dict[tuple[object, int], CosSin] = {}
        # Graphs of all layers, by their number and what else graphs depend on.
        self._stacks: dict[object, Captured] = {}
        self._pool = device.graph_pool()

    def wanted(self, rows: int) -> bool:
        """Whether a pass of so many rows is captured."""
        return rows in self.buckets and not self.failure

    def share(self, key: object, cos_sin: CosSin) -> CosSin:
        """The same numbers in memory that all layers' graphs of this bucket read."""
        rows = len(cos_sin.tensors[0])
        if not self.wanted(rows):
            return cos_sin
        shared = self._shared.setdefault((key, rows), cos_sin)
        for target, value in zip(shared, cos_sin, strict=True):
            if target is not value:
                target.copy_(value)
        return shared

    def capture(
        self, function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]
    ) -> Captured:
        """A graph, or ``function`` itself where there is none."""
        try:
            return self._device.capture(function, inputs, self._pool) or function
        except RuntimeError as error:
            self.failure = str(error).partition("\n")[0]
            return function

    def run_layers(
        self, layers: Sequence[tuple[nn.Module, CosSin]], hidden: Tensor, tree: TreeMask
    ) -> Tensor:
        """As ``run_in_turn``, in one graph."""
        captured = [
            (layer, cos_sin) for layer, cos_sin in layers if isinstance(layer, CapturedLayer)
        ]
        rows = hidden.shape[1]
        if (
            not isinstance(tree, PathAttention)
            or not self.wanted(rows)
            or len(captured) < len(layers)
            # A prompt's, in which launches do not count.
            or tree.shape.path > LEAST_PATH
        ):
            return run_in_turn(layers, hidden, tree)
        if tree.stop():
            raise Abandoned
        shared = {id(cos_sin): cos_sin for _, cos_sin in captured}
        inputs = (hidden, tree.table(rows), *(x for each in shared.values() for x in each))
        key = (len(captured), rows, tree.shape)
        if key not in self._stacks:
            order = [[*shared].index(id(cos_sin)) for _, cos_sin in captured]
            stack = _stack([layer.layer for layer, _ in captured], order, tree.kernel, tree.shape)
            self._stacks[key] = self.capture(stack, inputs)
        # Each layer hands out its part, which is where hidden states are taken (``eagle``).
        for (layer, cos_sin), out in zip(captured, self._stacks[key](*inputs), strict=True):
            layer.replayed = out
            hidden = layer(hidden, cos_sin, tree)
        return hidden


class CapturedLayer(nn.Module):
    """Computes what an ``OptimizedLayer`` does, with the same operations."""

    def __init__(self, layer: OptimizedLayer, graphs: Graphs) -> None:
        super().__init__()
        self.layer = layer
        self._graphs = graphs
        # What the graph of all layers has computed for this one.
        self.replayed: Tensor | None = None
        self._before: dict[int, Captured] = {}
        self._after: dict[int, Captured] = {}

    def forward(self, hidden: Tensor, cos_sin: CosSin, tree: TreeMask) -> Tensor:
        """Hidden states [1, n, H] -> [1, n, H], overwritten by the next pass of n rows."""
        if self.replayed is not None:
            replayed, self.replayed = self.replayed, None
            return replayed
        layer, rows = self.layer, hidden.shape[1]
        if isinstance(tree, PathAttention) or not self._graphs.wanted(rows):
            return layer.forward(hidden, cos_sin, tree)
        inputs = (hidden, *cos_sin)
        if rows not in self._before:
            self._before[rows] = self._graphs.capture(_before(layer), inputs)
        heads = self._before[rows](*inputs)
        attended = tree.attend(layer.attention.params, *heads)
        if rows not in self._after:
            self._after[rows] = self._graphs.capture(_after(layer), (attended, hidden))
        (out,) = self._after[rows](attended, hidden)
        return out


def _before(layer: OptimizedLayer) -> Callable[..., Sequence[Tensor]]:
    return lambda hidden, *cos_sin: layer.before(hidden, CosSin(*cos_sin))


def _after(layer: OptimizedLayer) -> Callable[..., Sequence[Tensor]]:
    return lambda attended, hidden: (layer.after(attended, hidden),)


def _stack(
    layers: Sequence[OptimizedLayer], order: Sequence[int], kernel: PathKernel, shape: TableShape
) -> Callable[..., Sequence[Tensor]]:
    """``order``: which cos and sin a layer takes."""

    def run(hidden: Tensor, table: Tensor, *cos_sins: Tensor) -> Sequence[Tensor]:
        shared = [CosSin(cos_sins[i], cos_sins[i + 1]) for i in range(0, len(cos_sins), 2)]
        tree, outputs = PathTable(kernel, table, shape), []
        for layer, number in zip(layers, order, strict=True):
            hidden = layer.forward(hidden, shared[number], tree)
            outputs.append(hidden)
        return outputs

    return run


def capture_layers(body: OptimizedModel, device: Device) -> Graphs:
    """Have the layers of ``body`` captured, but those with experts, whose numbers of rows are found
    on the way."""
    graphs = Graphs(device)
    body.share, body.run_layers = graphs.share, graphs.run_layers
    for i, layer in enumerate(body.layers):
        if isinstance(layer, OptimizedLayer) and isinstance(layer.mlp, OptimizedMLP):
            body.layers[i] = CapturedLayer(layer, graphs)
    return graphs
