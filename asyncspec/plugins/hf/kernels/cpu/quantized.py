"""Linear layers with weight-only quantised weights in torch's own kernels: int8 by output channel,
int4 by groups. Used where onnxruntime's are not there (``nbits.py``), and for experts.

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
from asyncspec.core.errors import UserError
from asyncspec.plugins.hf.checkpoint.packed import PackedMatrix, ReadRows, row_slices, unpack_levels
from asyncspec.plugins.hf.kernels.cpu.linear import RowwiseLinear

GROUP = 64
"""Weights that share a scale in int4; half as many where that fits the inner width better."""

_WIDTH = 32
"""Inner widths are padded to a multiple of this."""

_HEIGHT, _PACK_ROWS = 16, 64
"""int4: rows are padded to a multiple of one, and packed by the other."""

# Levels [n, padded K] int32 and (scale, offset) [groups, n, 2] bfloat16 of rows [first, end).
ReadLevels = Callable[[int, int], tuple[Tensor, Tensor]]

_GROUPS = (32, 64, 128, 256)
"""Lengths of groups that torch's int4 takes."""


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


class Int8Linear(_QuantizedLinear):
    """Symmetric int8, a scale for each output channel."""

    description = "int8"

    def load(self, read: ReadRows) -> None:
        height, width = self.out_features, self.in_features
        self._weight = torch.zeros(height, width + self._padding, dtype=torch.int8)
        self._scales = torch.empty(height, dtype=torch.bfloat16)
        for first, end in row_slices((height, width)):
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
        group = group_of(self.in_features)

        def rounded(first: int, end: int) -> tuple[Tensor, Tensor]:
            dense = read(first, end).float()
            # Missing rows only follow the last one.
            dense = torch.nn.functional.pad(dense, (0, self._padding, 0, -len(dense) % _HEIGHT))
            return quantize_int4(dense, group)

        self.load_levels(group, rounded)

    def load_levels(self, group: int, read: ReadLevels) -> None:
        """Pack levels in groups of so many columns."""
        self._group = group
        rows = self.out_features + -self.out_features % _HEIGHT
        columns = self.in_features + self._padding
        self._weight = torch.empty(rows, columns // 2, dtype=torch.uint8)
        self._steps = torch.empty(columns // self._group, rows, 2, dtype=torch.bfloat16)
        for first, end in row_slices((self.out_features, self.in_features), _PACK_ROWS):
            levels, steps = read(first, end)
            packed = torch._convert_weight_to_int4pack_for_cpu(levels, 1)
            self._weight[first : first + len(levels)] = packed
            self._steps[:, first : first + len(levels)] = steps

    def multiply(self, x: Tensor) -> Tensor:
        y = torch._weight_int4pack_mm_for_cpu(x, self._weight, self._group, self._steps)
        return y[:, : self.out_features]

    @property
    def description(self) -> str:
        return f"int4 in groups of {self._group}"

    @property
    def weight_bytes(self) -> int:
        return int4_bytes(self.out_features, self.in_features, self._group)


def takes_blocks(block: int, width: int) -> bool:
    """Whether blocks of rows of ``width`` are groups of torch's int4, and whole."""
    return block in _GROUPS and width % block == 0


class PackedInt4Linear(Int4Linear):
    """A 4-bit ``PackedMatrix`` that torch's kernel ``takes``, its scales rounded to bfloat16."""

    def __init__(
        self, packed: PackedMatrix, dtype: torch.dtype, bias: Tensor | None = None
    ) -> None:
        self._packed: PackedMatrix | None = packed
        super().__init__(packed.shape, packed.read, dtype, bias)
        self._packed = None

    @staticmethod
    def takes(packed: PackedMatrix) -> bool:
        """Whether its form is the kernel's."""
        return packed.bits == 4 and takes_blocks(packed.block, packed.columns)

    def load(self, read: ReadRows) -> None:
        packed = self._packed
        assert packed is not None

        def levels(first: int, end: int) -> tuple[Tensor, Tensor]:
            values, missing = packed.values[first:end], -(end - first) % _HEIGHT
            scale = packed.scales[first:end].float()
            zero = packed.zero_points
            zero = torch.full_like(scale, 8) if zero is None else zero[first:end].float()
            steps = torch.stack([scale, (8 - zero) * scale], -1).transpose(0, 1).bfloat16()
            codes = unpack_levels(values, 4).to(torch.int32)
            pad = torch.nn.functional.pad
            return pad(codes, (0, 0, 0, missing)), pad(steps, (0, 0, 0, missing))

        self.load_levels(packed.block, levels)


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


def int4_bytes(height: int, width: int, group: int) -> int:
    """Memory of a matrix of ``height`` output channels in int4."""
    rows, columns = height + -height % _HEIGHT, width + -width % _WIDTH
    return rows * (columns // 2 + columns // group * 2 * torch.bfloat16.itemsize)


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
