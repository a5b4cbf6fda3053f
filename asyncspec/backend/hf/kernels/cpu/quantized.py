"""Linear layers with weight-only quantised weights: int8 by output channel, int4 by groups.

Weights are rounded once, when they are read. The products are torch's own (they multiply in
bfloat16 and add in float32), and each output row depends on its input row alone, which the
self-test confirms. Activations of float32 models are rounded to bfloat16 before the product and its
result is converted back; both errors are a fraction of the weights' own (docs/guide/own-models.md).

Inner widths are padded with zeros, as the kernels read whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asyncspec.backend.base import Quantize
from asyncspec.backend.hf.kernels.cpu.linear import RowwiseLinear
from asyncspec.core.errors import UserError

GROUP = 64
"""Weights that share a scale in int4; half as many where that fits the inner width better."""

SLICE = 1 << 19
"""Weights quantised at a time, so that a dense matrix never lies beside its quantised form."""

_WIDTH = 32
"""Inner widths are padded to a multiple of this."""

_HEIGHT, _PACK_ROWS = 16, 64
"""int4: rows are padded to a multiple of one, and packed by the other."""

# Reads rows [first, end) of a weight matrix, [n, K], in any floating-point type.
ReadRows = Callable[[int, int], Tensor]


class _QuantizedLinear(RowwiseLinear):
    """Weights that are read and quantised some rows at a time."""

    def __init__(
        self, shape: tuple[int, ...], read: ReadRows, dtype: torch.dtype, bias: Tensor | None = None
    ) -> None:
        super().__init__(shape, dtype, bias)
        self._padding = -self.in_features % _WIDTH
        self.load(read)

    def load(self, read: ReadRows) -> None:
        """Read and quantise the weights."""
        raise NotImplementedError

    def multiply(self, x: Tensor) -> Tensor:
        """x [n, padded K] bfloat16 -> [n, N] bfloat16."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features).to(torch.bfloat16)
        if self._padding:
            flat = torch.nn.functional.pad(flat, (0, self._padding))
        y = self.multiply(flat.contiguous()).to(x.dtype)
        return (y if self.bias is None else y + self.bias).reshape(*x.shape[:-1], -1)

    def slices(self, multiple: int) -> list[tuple[int, int]]:
        """Ranges of rows of about ``SLICE`` weights; their starts are multiples of ``multiple``."""
        step = max(1, SLICE // self.in_features // multiple) * multiple
        height = self.out_features
        return [(first, min(first + step, height)) for first in range(0, height, step)]


class Int8Linear(_QuantizedLinear):
    """Symmetric int8, a scale for each output channel."""

    description = "int8"

    def load(self, read: ReadRows) -> None:
        height, width = self.out_features, self.in_features
        self._weight = torch.zeros(height, width + self._padding, dtype=torch.int8)
        self._scales = torch.empty(height, dtype=torch.bfloat16)
        for first, end in self.slices(1):
            levels, scales = quantize_int8(read(first, end).float())
            self._weight[first:end, :width] = levels
            self._scales[first:end] = scales

    def multiply(self, x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x, self._weight, self._scales)

    @property
    def weight_bytes(self) -> int:
        return int8_bytes(self.out_features, self.in_features)


class Int4Linear(_QuantizedLinear):
    """Asymmetric int4, rounded to nearest, a scale and an offset for each group of a row."""

    def load(self, read: ReadRows) -> None:
        self._group = group_of(self.in_features)
        rows = self.out_features + -self.out_features % _HEIGHT
        columns = self.in_features + self._padding
        self._weight = torch.empty(rows, columns // 2, dtype=torch.uint8)
        self._steps = torch.empty(columns // self._group, rows, 2, dtype=torch.bfloat16)
        for first, end in self.slices(_PACK_ROWS):
            dense = read(first, end).float()
            # Missing rows only follow the last one.
            dense = torch.nn.functional.pad(dense, (0, self._padding, 0, -len(dense) % _HEIGHT))
            levels, steps = quantize_int4(dense, self._group)
            packed = torch._convert_weight_to_int4pack_for_cpu(levels, 1)
            self._weight[first : first + len(dense)] = packed
            self._steps[:, first : first + len(dense)] = steps

    def multiply(self, x: Tensor) -> Tensor:
        y = torch._weight_int4pack_mm_for_cpu(x, self._weight, self._group, self._steps)
        return y[:, : self.out_features]

    @property
    def description(self) -> str:
        return f"int4 in groups of {self._group}"

    @property
    def weight_bytes(self) -> int:
        return int4_bytes(self.out_features, self.in_features)


def quantize_int8(dense: Tensor) -> tuple[Tensor, Tensor]:
    """dense [n, K] float32 -> levels [n, K] int8 and scales [n] bfloat16, to be multiplied. Weights
    are divided by the rounded scale, which therefore adds no error."""
    largest = dense.abs().amax(1)
    scales = torch.where(largest > 0, largest / 127, 1).bfloat16()
    levels = (dense / scales.float()[:, None]).round_().clamp_(-127, 127)
    return levels.to(torch.int8), scales


def quantize_int4(dense: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """dense [n, K] float32, K a multiple of ``group`` -> levels [n, K] int32 in 0..15 and (scale,
    offset) [K / group, n, 2] bfloat16; a weight is ``(level - 8) * scale + offset``."""
    rows, width = dense.shape
    grouped = dense.view(rows, width // group, group)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale = torch.where(high > low, (high - low) / 15, 1).bfloat16()
    offset = (low + 8 * scale.float()).bfloat16()
    levels = (grouped - offset.float()[..., None]) / scale.float()[..., None]
    levels = levels.round_().add_(8).clamp_(0, 15).to(torch.int32)
    return levels.view(rows, width), torch.stack([scale, offset], -1).transpose(0, 1).contiguous()


def group_of(width: int) -> int:
    """Weights of a row of ``width`` that share a scale."""
    return GROUP if (width + -width % _WIDTH) % GROUP == 0 else _WIDTH


def int8_bytes(height: int, width: int) -> int:
    """Memory of a matrix of ``height`` output channels in int8."""
    return height * (width + -width % _WIDTH + torch.bfloat16.itemsize)


def int4_bytes(height: int, width: int) -> int:
    """Memory of a matrix of ``height`` output channels in int4."""
    rows, columns = height + -height % _HEIGHT, width + -width % _WIDTH
    return rows * (columns // 2 + columns // group_of(width) * 2 * torch.bfloat16.itemsize)


def check_quantize(quantize: Quantize) -> None:
    """Raise ``UserError`` where this torch lacks the products."""
    # int4 needs both: the head is int8 then.
    products = ("_weight_int8pack_mm", "_weight_int4pack_mm_for_cpu")
    for name in products[: ("none", "int8", "int4").index(quantize)]:
        if not hasattr(torch, name):
            raise UserError(
                f"torch {torch.__version__} has no {name}, which {quantize} weights need; use "
                "unquantised ones or install a newer torch"
            )
