"""Optimized layers on an accelerator: two graphs each, before and after attention, for each bucket
of rows (``kernels/accelerator/graphs.py``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from asyncspec.backend.hf.attention import TreeMask
from asyncspec.backend.hf.device import Device
from asyncspec.backend.hf.kernels.accelerator.graphs import Captured
from asyncspec.backend.hf.optimized.layers import CosSin, OptimizedLayer, OptimizedMLP
from asyncspec.backend.hf.optimized.model import OptimizedModel


class Graphs:
    """The graphs of a shard. They are captured by the first pass of each number of rows."""

    def __init__(self, device: Device) -> None:
        self._device = device
        # Numbers of rows that are captured; other passes run operation by operation.
        self.buckets: tuple[int, ...] = ()
        # Why a capture failed, after which there are none; "" where none did.
        self.failure = ""
        self._shared: dict[tuple[object, int], CosSin] = {}

    def wanted(self, rows: int) -> bool:
        """Whether a pass of so many rows is captured."""
        return rows in self.buckets and not self.failure

    def share(self, key: object, cos_sin: CosSin) -> CosSin:
        """The same numbers in memory that all layers' graphs of this bucket read."""
        rows = len(cos_sin[0])
        if not self.wanted(rows):
            return cos_sin
        known = self._shared.setdefault((key, rows), cos_sin)
        for own, given in zip(known, cos_sin, strict=True):
            if own is not given:
                own.copy_(given)
        return known

    def capture(
        self, function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]
    ) -> Captured:
        """A graph, or ``function`` itself where there is none."""
        try:
            return self._device.capture(function, inputs) or function
        except RuntimeError as error:
            self.failure = str(error).partition("\n")[0]
            return function


class CapturedLayer(nn.Module):
    """Computes what an ``OptimizedLayer`` does, with the same operations."""

    def __init__(self, layer: OptimizedLayer, graphs: Graphs) -> None:
        super().__init__()
        self.layer = layer
        self._graphs = graphs
        self._before: dict[int, Captured] = {}
        self._after: dict[int, Captured] = {}

    def forward(self, hidden: Tensor, cos_sin: CosSin, tree: TreeMask) -> Tensor:
        """Hidden states [1, n, H] -> [1, n, H], overwritten by the next pass of n rows."""
        layer, rows = self.layer, hidden.shape[1]
        if not self._graphs.wanted(rows):
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
    return lambda hidden, *cos_sin: layer.before(hidden, CosSin(cos_sin))


def _after(layer: OptimizedLayer) -> Callable[..., Sequence[Tensor]]:
    return lambda attended, hidden: (layer.after(attended, hidden),)


def capture_layers(body: OptimizedModel, device: Device) -> Graphs:
    """Have the layers of ``body`` captured, but those with experts, whose numbers of rows are found
    on the way."""
    graphs = Graphs(device)
    body.share = graphs.share
    for i, layer in enumerate(body.layers):
        if isinstance(layer, OptimizedLayer) and isinstance(layer.mlp, OptimizedMLP):
            body.layers[i] = CapturedLayer(layer, graphs)
    return graphs
