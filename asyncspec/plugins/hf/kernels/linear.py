"""Linear layers of published levels. They are never rounded once more: where no kernel takes them
as they are, their matrix is kept dense."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncspec.plugins.hf.checkpoint.formats.levels import packed_bits, packed_block, read_packed
from asyncspec.plugins.hf.checkpoint.formats.tensors import QuantizedTensor
from asyncspec.plugins.hf.checkpoint.packed import PackedMatrix
from asyncspec.plugins.hf.kernels.cpu.capabilities import KernelSettings
from asyncspec.plugins.hf.kernels.cpu.dense import dense_linear
from asyncspec.plugins.hf.kernels.cpu.linear import RowwiseLinear
from asyncspec.plugins.hf.kernels.cpu.nbits import (
    NBitsLinear,
    WaitingNBits,
    packed_bytes,
    uses_levels,
)
from asyncspec.plugins.hf.kernels.cpu.ort import Graph, GraphError
from asyncspec.plugins.hf.kernels.cpu.quantized import PackedInt4Linear, int4_bytes, takes_blocks

_INDEX = torch.int32


class ReorderedLinear(RowwiseLinear):
    """A product whose matrix has its columns in another ``order`` than its inputs (act-order)."""

    def __init__(self, product: RowwiseLinear, order: Tensor) -> None:
        shape = (product.out_features, product.in_features)
        super().__init__(shape, product.dtype, product.bias, product.min_rows)
        self.min_tested_rows, self.any_rows = product.min_tested_rows, product.any_rows
        self.row_multiple = product.row_multiple
        # In a tuple, so that its memory is counted here alone.
        self._inner = (product,)
        self._order = order.to(_INDEX)

    def product(self, x: Tensor) -> Tensor:
        return self._inner[0].product(x.index_select(-1, self._order))

    def unrounded_product(self, x: Tensor) -> Tensor:
        return self._inner[0].unrounded_product(x.index_select(-1, self._order))

    @property
    def description(self) -> str:
        return self._inner[0].description

    @property
    def weight_bytes(self) -> int:
        return self._inner[0].weight_bytes + self._order.numel() * _INDEX.itemsize


class WaitingLevels(WaitingNBits):
    """Levels that wait to be packed in a layer's graph or by themselves."""

    def __init__(
        self,
        matrix: PackedMatrix,
        order: Tensor | None,
        bias: Tensor | None,
        settings: KernelSettings,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(matrix, bias, dtype)
        self._order, self._settings = order, settings

    def add_to(self, graph: Graph, x: str) -> str:
        if self._order is not None:
            x = graph.add("Gather", x, graph.integers(*self._order.tolist()), axis=-1)
        return super().add_to(graph, x)

    def product(self, x: Tensor) -> Tensor:
        return super().product(x if self._order is None else x.index_select(-1, self._order))

    def pack(self) -> RowwiseLinear:
        packed, bias, dtype = self._packed, self.bias, self.dtype
        product: RowwiseLinear
        try:
            product = NBitsLinear(packed, bias, dtype)
        except GraphError:  # it does not multiply these rightly here
            if PackedInt4Linear.takes(packed):
                product = PackedInt4Linear(packed, dtype, bias)
            else:
                product = dense_linear(packed.dequantized(dtype), bias, self._settings, dtype)
        return product if self._order is None else ReorderedLinear(product, self._order)


def levels_linear(
    name: str,
    info: QuantizedTensor,
    bias: Tensor | None,
    settings: KernelSettings,
    dtype: torch.dtype,
) -> RowwiseLinear | None:
    """The layer ``name`` of a matrix of levels, for rows of ``dtype``; None where it is to be kept
    dense. Raises ``CheckpointError``."""
    if not (uses_levels(name) or _torch_takes(info)):
        return None
    matrix, order = read_packed(info)
    if uses_levels(name):
        return WaitingLevels(matrix, order, bias, settings, dtype)
    product = PackedInt4Linear(matrix, dtype, bias)
    return product if order is None else ReorderedLinear(product, order)


def levels_bytes(name: str, info: QuantizedTensor) -> int | None:
    """Memory of the layer's weights once packed; None where it is kept dense."""
    (height, width), block = info.shape, packed_block(info)
    # Whether it is in another order than the inputs is not known before it is read.
    index = _INDEX.itemsize * width if {"g_idx", "weight_g_idx"} & info.parts.keys() else 0
    if uses_levels(name):
        symmetric = {"qzeros", "weight_zero_point"}.isdisjoint(info.parts)
        bits = packed_bits(info)
        return packed_bytes(height, width, bits, block, symmetric=symmetric) + index
    return int4_bytes(height, width, block) + index if _torch_takes(info) else None


def _torch_takes(info: QuantizedTensor) -> bool:
    block = packed_block(info)
    return packed_bits(info) == 4 and takes_blocks(block, info.shape[1])
