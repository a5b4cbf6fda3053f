"""Dense matrices of the same rows, kept as one: queries, keys and values, or gates and the others.

One product takes 2 to 4 % less time than gates and the others apart, and 11 % and more less than
queries, keys and values (docs/results/kernels.md). Bits of a column do not depend on its
neighbours; the self-test tries the stacked ones. A model is tried before its layers are known to
multiply so, until when weights are kept as they were read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from asyncspec.plugins.hf.checkpoint.packed import row_slices
from asyncspec.plugins.hf.kernels.cpu.capabilities import KernelSettings
from asyncspec.plugins.hf.kernels.cpu.dense import dense_linear
from asyncspec.plugins.hf.kernels.cpu.linear import RowwiseLinear
from asyncspec.plugins.hf.kernels.cpu.ort import Graph, GraphError, WaitingLinear
from asyncspec.plugins.hf.kernels.process import free_heap

NAMES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
"""How names of such matrices end."""


class WaitingDense(WaitingLinear):
    """Weights [N, K] as ``dense_linear`` takes them."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, settings: KernelSettings, dtype: torch.dtype
    ) -> None:
        super().__init__(tuple(weight.shape), dtype, bias)
        self._weight, self.settings = weight, settings

    def product(self, x: Tensor) -> Tensor:
        """Product with the rows with which a model is tried."""
        slices = row_slices((self.out_features, self.in_features))
        parts = (self._weight[first:end].to(x.dtype) for first, end in slices)
        y = torch.cat([torch.nn.functional.linear(x, part) for part in parts], -1)
        return y if self.bias is None else y.add_(self.bias)

    def add_to(self, graph: Graph, x: str) -> str:
        raise GraphError

    def pack(self) -> RowwiseLinear:
        return _packed([self])

    @property
    def form(self) -> tuple[object, ...]:
        """Matrices of one form may be stacked."""
        return self.in_features, self._weight.dtype, self.dtype

    def take(self) -> Tensor:
        """The weights, which are kept no longer."""
        weight = self._weight
        del self._weight
        return weight


def stack(linears: nn.ModuleList, heights: Sequence[int]) -> nn.ModuleList:
    """One that computes what ``linears`` of these ``heights`` do, side by side; themselves where
    they are not of one form."""
    waiting = [x for x in linears if isinstance(x, WaitingDense)]
    if [x.out_features for x in waiting] != [*heights] or len({x.form for x in waiting}) != 1:
        return linears
    return nn.ModuleList([_packed(waiting)])


def _packed(linears: Sequence[WaitingDense]) -> RowwiseLinear:
    first, bias = linears[0], None
    if any(x.bias is not None for x in linears):
        each = (torch.zeros(x.out_features) if x.bias is None else x.bias for x in linears)
        bias = torch.cat([x.to(first.dtype) for x in each])
    weights = [x.take() for x in linears]
    # At most two forms are held at a time: as read, joined, packed.
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    weights.clear()
    packed = dense_linear(weight, bias, first.settings, first.dtype)
    del weight
    free_heap(packed.weight_bytes)
    return packed
