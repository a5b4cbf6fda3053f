"""Weights of 4 bits as a product for tensor cores reads them, and that product's definition.

The device's own is in ``triton_int4.py``.
"""

from __future__ import annotations

from typing import Protocol

import torch
from msgspec import Struct
from torch import Tensor

from asyncspec.plugins.hf.checkpoint.packed import (
    PackedMatrix,
    pad_columns,
    quantize,
    row_slices,
    unpack_levels,
)
from asyncspec.plugins.hf.kernels.probing import noise

GROUPS = (32, 64, 128, 256)
"""Columns that may share a scale."""

WORDS = 32
"""Words of an output in a step; a product has four times as many columns at least. The word j, of
16 bits, has the levels of the columns j, j + 32, j + 64 and j + 96, the first in its lowest bits:
four tiles of neighbouring columns come out of one of words. No group may be shorter."""

TILE = 64
"""Outputs whose words lie together, step by step: as many as an instruction takes."""

MOST_OUTPUTS = 2 * TILE
"""Outputs of a program, at most."""

LEAST_ROWS, MOST_ROWS = 16, 256
"""Rows of a program, and of a launch."""

_ZERO_POINT = 15
"""The bits of a float32 scale that are its zero point, as 2^-20 of a scale are nothing."""

_PROGRAMS, _LEAST_PART = 256, 512
"""The inner dimension is cut until there are so many programs, so that a GPU has several for each
of its processors, but not in parts of fewer columns."""

_TOLERANCE = 0.01
"""Error of a product that is allowed, relative to its largest number."""

_TRIED, _TRIED_ROWS = (TILE + 16, 4 * _LEAST_PART), (129, 17, 5)
"""Outputs and columns of a matrix that a product is tried with, in parts and not in whole tiles;
numbers of rows, for which programs have other sizes."""


class Int4Weights(Struct, frozen=True):
    """A matrix [N, K], N padded to ``MOST_OUTPUTS`` and K to whole steps."""

    outputs: int
    width: int
    # Parts of the inner dimension, by the shape alone: a row's sums have one order.
    splits: int
    # int16 [tiles, steps, TILE, WORDS].
    words: Tensor
    # int32 [groups, padded N]: bits of float32 scales, the lowest four of which are zero points.
    scales: Tensor
    # int32, zeros between launches: how many parts of a tile have arrived.
    arrived: Tensor

    @property
    def bytes_held(self) -> int:
        """Memory in bytes."""
        return sum(x.numel() * x.element_size() for x in (self.words, self.scales, self.arrived))


class Int4Product(Protocol):
    """x [n, K] bfloat16 or float16 -> [n, N]."""

    def __call__(self, x: Tensor, weights: Int4Weights) -> Tensor: ...


def int4_bytes(height: int, width: int, group: int) -> int:
    """What weights [``height``, ``width``] take, without padding."""
    return height * (width // 2 + width // group * torch.int32.itemsize)


def pack_int4(matrix: PackedMatrix, device: torch.device, words: int = WORDS) -> Int4Weights:
    """A matrix of 4 bits in blocks of ``GROUPS``, on the device."""
    (outputs, width), step = matrix.shape, 4 * words
    tiles, steps = -(-outputs // MOST_OUTPUTS) * MOST_OUTPUTS // TILE, -(-width // step)
    kept = torch.zeros(tiles * TILE, steps, words, dtype=torch.int16, device=device)
    for first, end in row_slices(matrix.shape):
        levels = unpack_levels(matrix.values[first:end].to(device), matrix.bits)
        levels = pad_columns(levels[:, :width], step).view(end - first, steps, 4, words)
        a, b, c, d = levels.to(torch.int32).unbind(2)
        kept[first:end] = (a | b << 4 | c << 8 | d << 12).to(torch.int16)
    kept = kept.view(tiles, TILE, steps, words).transpose(1, 2).contiguous()
    bits = matrix.scales.to(device).float().contiguous().view(torch.int32) & ~_ZERO_POINT
    zeros = matrix.zero_points
    bits |= 8 if zeros is None else zeros.to(device).to(torch.int32)
    # Scales of blocks longer than a step, once for each step.
    group = min(matrix.block, step)
    bits = bits.repeat_interleave(matrix.block // group, 1).t()
    scales = bits.new_zeros(steps * step // group, tiles * TILE)
    count = min(len(bits), len(scales))
    scales[:count, :outputs] = bits[:count]
    splits = 1
    while tiles * splits < _PROGRAMS and width // (2 * splits) >= _LEAST_PART:
        splits *= 2
    arrived = torch.zeros(tiles * MOST_ROWS // LEAST_ROWS, dtype=torch.int32, device=device)
    return Int4Weights(outputs, width, splits, kept, scales, arrived)


def multiply_by_definition(x: Tensor, weights: Int4Weights) -> Tensor:
    """By torch's operations: what an emulated device computes. Row by row, as on many CPUs a row of
    torch's products has other bits among others."""
    words = weights.words.transpose(1, 2).flatten(0, 1).to(torch.int32)
    levels = torch.stack([words >> shift & 15 for shift in (0, 4, 8, 12)], 2).flatten(1)
    bits = weights.scales.t().contiguous()
    levels = levels.view(*bits.shape, -1) - (bits & _ZERO_POINT).unsqueeze(-1)
    scales = (bits & ~_ZERO_POINT).view(torch.float32)
    dense = (levels * scales.unsqueeze(-1)).flatten(1)[: weights.outputs, : weights.width]
    return torch.stack([dense.mv(row) for row in x.float()]).to(x.dtype)


def agrees(multiply: Int4Product, device: torch.device, dtype: torch.dtype, group: int) -> bool:
    """Whether a product computes what the definition does, and a row's numbers do not depend on how
    many there are."""
    dense, x = noise(*_TRIED), noise(_TRIED_ROWS[0], _TRIED[1], seed=1).to(dtype)
    matrix = quantize(lambda first, end: dense[first:end], _TRIED, 4, group)
    want = multiply_by_definition(x, pack_int4(matrix, torch.device("cpu"))).float()
    weights, inputs = pack_int4(matrix, device), x.to(device)
    largest, *fewer = (multiply(inputs[:count], weights).float().cpu() for count in _TRIED_ROWS)
    close = (largest - want).abs().max() <= _TOLERANCE * want.abs().max()
    return bool(close) and all(torch.equal(largest[: len(few)], few) for few in fewer)
