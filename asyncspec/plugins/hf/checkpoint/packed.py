"""Matrices of unsigned 4- or 8-bit levels in blocks of a row that share a scale: the one form in
which kernels take quantised weights, whatever tool quantised them.

A weight is ``(level - zero point) * scale``. Rows are output channels. Matrices are read and
quantised some rows at a time, so that a dense matrix never lies beside its quantised form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from msgspec import Struct
from torch import Tensor

# Reads rows [first, end) of a weight matrix, [n, K], in any floating-point type.
ReadRows = Callable[[int, int], Tensor]

SLICE = 1 << 19
"""Weights quantised at a time."""

BLOCKS = (16, 32, 64, 128, 256)
"""Block lengths that kernels know."""

_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Shares of a block's range tried for 4 bits; the one with the smallest squared error is kept."""


class PackedMatrix(Struct, frozen=True):
    """A matrix [rows, columns]. Rows are padded with zeros to whole blocks of ``block`` columns:
    ``ceil(columns / block)`` blocks."""

    # 4 or 8, the bits of a level.
    bits: int
    # Consecutive columns of a row that share scale and zero point; one of ``BLOCKS``.
    block: int
    columns: int
    # uint8 [rows, blocks * block * bits / 8]: a level a byte, or two, the first in the low half.
    values: Tensor
    # [rows, blocks], floating point; kernels take float32.
    scales: Tensor
    # uint8 [rows, blocks], a byte each; None: ``2^(bits - 1)``, symmetric weights.
    zero_points: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows (output channels) and columns, without padding."""
        return len(self.values), self.columns

    def read(self, first: int, end: int) -> Tensor:
        """Weights of rows [first, end), [n, columns] float32: a ``ReadRows``."""
        levels = unpack_levels(self.values[first:end], self.bits).float()
        blocks = levels.view(*self.scales[first:end].shape, self.block)
        zero = self.zero_points
        blocks -= 2 ** (self.bits - 1) if zero is None else zero[first:end].float().unsqueeze(-1)
        blocks *= self.scales[first:end].float().unsqueeze(-1)
        return levels[:, : self.columns]

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """All weights, [rows, columns]."""
        return self.read(0, len(self.values)).to(dtype)

    @property
    def bytes_held(self) -> int:
        """Memory in bytes."""
        parts = (self.values, self.scales, self.zero_points)
        return sum(x.numel() * x.element_size() for x in parts if x is not None)


def pack_levels(levels: Tensor, bits: int) -> Tensor:
    """Levels [n, padded K] of any integer type -> uint8 [n, padded K * bits / 8]."""
    levels = levels.to(torch.uint8)
    return levels if bits == 8 else levels[:, ::2] | levels[:, 1::2] << 4


def unpack_levels(values: Tensor, bits: int) -> Tensor:
    """The inverse: uint8 [n, padded K * bits / 8] -> uint8 [n, padded K]."""
    if bits == 8:
        return values
    # ``stack`` takes fifty times as long.
    levels = values.new_empty(len(values), 2 * values.shape[1])
    levels[:, ::2], levels[:, 1::2] = values & 15, values >> 4
    return levels


def pad_columns(dense: Tensor, block: int) -> Tensor:
    """[n, K] with zeros up to whole blocks."""
    return torch.nn.functional.pad(dense, (0, -dense.shape[1] % block))


def row_slices(shape: tuple[int, ...], multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Ranges of rows of about ``SLICE`` weights; their starts are multiples of ``multiple``."""
    height, width = shape
    step = max(1, SLICE // width // multiple) * multiple
    return ((first, min(first + step, height)) for first in range(0, height, step))


def quantize(read: ReadRows, shape: tuple[int, ...], bits: int, block: int) -> PackedMatrix:
    """Round dense rows to nearest: 8 bits symmetric, 4 bits with a zero point for each block."""
    height, width = shape
    blocks = -(-width // block)
    values = torch.empty(height, blocks * block * bits // 8, dtype=torch.uint8)
    scales = torch.empty(height, blocks)
    zero_points = torch.empty(height, blocks, dtype=torch.uint8) if bits == 4 else None
    for first, end in row_slices(shape):
        dense = pad_columns(read(first, end).float(), block).view(-1, blocks, block)
        scale, zero = _symmetric(dense) if zero_points is None else _asymmetric(dense)
        levels = _levels(dense, scale, zero, bits)
        values[first:end] = pack_levels(levels.flatten(1), bits)
        scales[first:end] = scale
        if zero_points is not None:
            zero_points[first:end] = zero
    return PackedMatrix(bits, block, width, values, scales, zero_points)


def _levels(blocks: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """blocks [n, blocks, block], scale and zero point [n, blocks] -> levels, as float32."""
    levels = (blocks / scale.unsqueeze(-1)).round_().add_(zero.unsqueeze(-1))
    return levels.clamp_(0, 2**bits - 1)


def _symmetric(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero point [n, blocks] of 8 bits."""
    largest = blocks.abs().amax(-1)
    return _nonzero(largest / 127), torch.full_like(largest, 128)


def _asymmetric(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero point [n, blocks] of 4 bits. The range includes zero, as a zero point must
    be a level."""
    low, high = blocks.amin(-1).clamp_(max=0), blocks.amax(-1).clamp_(min=0)
    best = torch.full_like(low, torch.inf)
    scale, zero = torch.ones_like(low), torch.zeros_like(low)
    for shrink in _SHRINKS:
        step = _nonzero((high - low) * (shrink / 15))
        offset = (-low * shrink / step).round_()
        off = _levels(blocks, step, offset, 4).sub_(offset.unsqueeze(-1))
        error = off.mul_(step.unsqueeze(-1)).sub_(blocks).square_().sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        scale, zero = torch.where(better, step, scale), torch.where(better, offset, zero)
    return scale, zero


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, 1)
