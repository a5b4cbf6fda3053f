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
ReadRows = Callable[[int, int], torch.Tensor]


class Int8Linear(RowwiseLinear):
    """Symmetric int8, a scale for each output channel."""

    def __init__(
        self,
        shape: tuple[int, ...],
        read: ReadRows,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
    ) -> None:
        super().__init__(shape, dtype, bias, self.min_tested_rows)
        height, width = shape
        self._padding = -width % _WIDTH
        self._weight = torch.zeros(height, width + self._padding, dtype=torch.int8)
        self._scales = torch.empty(height, dtype=torch.bfloat16)
        for first, end in _slices(height, width, 1):
            levels, scales = quantize_int8(read(first, end).float())
            self._weight[first:end, :width] = levels
            self._scales[first:end] = scales

    def product(self, x: torch.Tensor) -> torch.Tensor:
        flat = _activations(x, self.in_features, self._padding)
        y = torch._weight_int8pack_mm(flat, self._weight, self._scales)
        return _results(x, y, self._bias)

    @property
    def description(self) -> str:
        return "int8"

    @property
    def weight_bytes(self) -> int:
        return int8_bytes(self.out_features, self.in_features)


class Int4Linear(RowwiseLinear):
    """Asymmetric int4, rounded to nearest, a scale and an offset for each group of a row."""

    def __init__(
        self,
        shape: tuple[int, ...],
        read: ReadRows,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
    ) -> None:
        super().__init__(shape, dtype, bias, self.min_tested_rows)
        height, width = shape
        self._padding = -width % _WIDTH
        self._group = group_of(width)
        rows, columns = height + -height % _HEIGHT, width + self._padding
        self._weight = torch.empty(rows, columns // 2, dtype=torch.uint8)
        self._steps = torch.empty(columns // self._group, rows, 2, dtype=torch.bfloat16)
        for first, end in _slices(height, width, _PACK_ROWS):
            dense = read(first, end).float()
            # Missing rows only follow the last one.
            dense = torch.nn.functional.pad(dense, (0, self._padding, 0, -len(dense) % _HEIGHT))
            levels, steps = quantize_int4(dense, self._group)
            packed = torch._convert_weight_to_int4pack_for_cpu(levels, 1)
            self._weight[first : first + len(dense)] = packed
            self._steps[:, first : first + len(dense)] = steps

    def product(self, x: torch.Tensor) -> torch.Tensor:
        flat = _activations(x, self.in_features, self._padding)
        y = torch._weight_int4pack_mm_for_cpu(flat, self._weight, self._group, self._steps)
        return _results(x, y[:, : self.out_features], self._bias)

    @property
    def description(self) -> str:
        return f"int4 in groups of {self._group}"

    @property
    def weight_bytes(self) -> int:
        return int4_bytes(self.out_features, self.in_features)


def quantize_int8(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """dense [n, K] float32 -> levels [n, K] int8 and scales [n] bfloat16, to be multiplied. Weights
    are divided by the rounded scale, which therefore adds no error."""
    largest = dense.abs().amax(1)
    scales = torch.where(largest > 0, largest / 127, 1).bfloat16()
    levels = (dense / scales.float()[:, None]).round_().clamp_(-127, 127)
    return levels.to(torch.int8), scales


def quantize_int4(dense: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
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
    needs = {
        "none": (),
        "int8": ("_weight_int8pack_mm",),
        "int4": ("_weight_int8pack_mm", "_weight_int4pack_mm_for_cpu"),
    }
    for name in needs[quantize]:
        if not hasattr(torch, name):
            raise UserError(
                f"torch {torch.__version__} has no {name}: leave quantize = {quantize!r} out, "
                "or install a newer torch"
            )


def _slices(height: int, width: int, multiple: int) -> list[tuple[int, int]]:
    """Ranges of rows of about ``SLICE`` weights; their starts are multiples of ``multiple``."""
    step = max(1, SLICE // width // multiple) * multiple
    return [(first, min(first + step, height)) for first in range(0, height, step)]


def _activations(x: torch.Tensor, width: int, padding: int) -> torch.Tensor:
    flat = x.reshape(-1, width).to(torch.bfloat16)
    return torch.nn.functional.pad(flat, (0, padding)) if padding else flat.contiguous()


def _results(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = y.to(x.dtype)
    return (y if bias is None else y + bias).reshape(*x.shape[:-1], -1)
