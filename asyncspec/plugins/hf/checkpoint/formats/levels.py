"""Published integer formats as levels in blocks, the form that kernels take (``packed.py``).

Codes are unpacked some rows at a time: no dense matrix is ever whole in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.hf.checkpoint.files.stored import (
    read_stored,
    read_stored_columns,
    read_stored_rows,
)
from asyncspec.plugins.hf.checkpoint.formats.tensors import QuantizedTensor
from asyncspec.plugins.hf.checkpoint.packed import (
    BLOCKS,
    PackedMatrix,
    pack_levels,
    row_slices,
    unpack_levels,
)

_AWQ_NIBBLES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where in a word of AWQ the outputs 0 to 7 are."""

_SIGN = 128
"""Level 0 of signed bytes."""

_BLOCK = 128
"""Longest block that longer groups are split into."""


class Levels:
    """A matrix [N, K] as levels, read by rows. A weight is ``(level - zero point) * scale`` of its
    row and of the group of its column."""

    def __init__(self, info: QuantizedTensor) -> None:
        self.info = info
        self.scales = _scales(info)
        self.zeros = _zeros(info)
        # The group of each column [K], where columns are not in order of their groups.
        self.groups = _groups(info)

    def values(self, first: int, end: int) -> Tensor:
        """Levels of rows [first, end) as ``pack_levels`` packs them, without padding. In most
        layouts they lie in the file's words like that, or in its columns of words."""
        info, parts = self.info, self.info.parts
        if info.layout == "awq":
            words = read_stored_columns(parts["qweight"], first // 8, -(-end // 8))
            levels = _awq_levels(words).t()[first % 8 :][: end - first]
            return pack_levels(levels.contiguous(), 4)
        if info.layout == "gptq":
            words = read_stored_columns(parts["qweight"], first, end).t().contiguous()
            return words.view(torch.uint8) if info.bits != 2 else pack_levels(_quarters(words), 4)
        if info.layout == "packed":
            return read_stored_rows(parts["weight_packed"], first, end).view(torch.uint8)
        return _unsigned(read_stored_rows(parts["weight"], first, end))

    def read(self, first: int, end: int) -> Tensor:
        """Levels of rows [first, end), uint8 [n, K]."""
        return unpack_levels(self.values(first, end), packed_bits(self.info))

    def rows(self, first: int, end: int) -> Tensor:
        """Weights of rows [first, end), float32 [n, K]."""
        group = self.groups
        if group is None:
            group = torch.arange(self.info.shape[1]) // self.info.group
        zeros: Tensor | int = 2 ** (self.info.bits - 1)
        if self.zeros is not None:
            zeros = self.zeros[first:end].float()[:, group]
        levels = self.read(first, end).float()
        return levels.sub_(zeros).mul_(self.scales[first:end][:, group])


def read_packed(info: QuantizedTensor) -> tuple[PackedMatrix, Tensor | None]:
    """The matrix and, if its columns are in another order than inputs are, the input [K] (int64)
    that each column is for. Raises ``CheckpointError``."""
    source, (height, width) = Levels(info), info.shape
    bits, block = packed_bits(info), packed_block(info)
    order = None if source.groups is None else source.groups.argsort(stable=True)
    blocks = -(-width // block)
    spread = torch.arange(blocks) * block // info.group
    zeros = source.zeros
    values = torch.empty(height, blocks * block * bits // 8, dtype=torch.uint8)
    for first, end in row_slices(info.shape):
        if order is None and width % block == 0:
            values[first:end] = source.values(first, end)
            continue
        levels = source.read(first, end)
        if order is not None:
            levels = levels.index_select(1, order)
        if missing := blocks * block - width:
            # Zeros, whatever the zero point is.
            fill = torch.full((end - first, 1), 2 ** (bits - 1), dtype=torch.uint8)
            fill = fill if zeros is None else zeros[first:end, -1:]
            levels = torch.cat([levels, fill.expand(-1, missing)], 1)
        values[first:end] = pack_levels(levels, bits)
    scales = source.scales[:, spread].contiguous()
    zeros = None if zeros is None else zeros[:, spread].contiguous()
    return PackedMatrix(bits, block, width, values, scales, zeros), order


def is_reordered(info: QuantizedTensor) -> bool:
    """Whether a matrix has, or as far as its files are here may have, its columns in another order
    than inputs are."""
    try:
        return _groups(info) is not None
    except CheckpointError:
        return True


def packed_bits(info: QuantizedTensor) -> int:
    """Bits of a level as it is kept."""
    return max(4, info.bits)


def packed_block(info: QuantizedTensor) -> int:
    """Length of the blocks that a matrix is kept in: its groups, or equal parts of longer ones."""
    width, group = info.shape[1], info.group
    lengths = [block for block in reversed(BLOCKS) if block <= _BLOCK]
    if group >= width:
        # A scale for the whole row, which may end within a block.
        return next((block for block in lengths if width % block == 0), 32)
    return group if group in BLOCKS else next(b for b in lengths if group % b == 0)


def _levels(words: Tensor, bits: int) -> Tensor:
    """int32 [n, m], the lowest bits first -> uint8 [n, m * 32 / bits]."""
    return _quarters(words) if bits == 2 else unpack_levels(words.view(torch.uint8), bits)


def _quarters(words: Tensor) -> Tensor:
    """int32 [n, m] -> levels of two bits, uint8 [n, 16 m]."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
    return (words.view(torch.uint8).unsqueeze(-1) >> shifts & 3).flatten(1)


def _awq_levels(words: Tensor) -> Tensor:
    """int32 [n, m] -> uint8 [n, 8 m]."""
    nibbles = unpack_levels(words.view(torch.uint8), 4).view(len(words), -1, 8)
    return nibbles[..., _AWQ_NIBBLES].flatten(1)


def _unsigned(levels: Tensor) -> Tensor:
    """int8 to uint8, -128 to 0."""
    return levels.view(torch.uint8) ^ _SIGN


def _scales(info: QuantizedTensor) -> Tensor:
    """float32 [N, groups]."""
    name = {"awq": "scales", "gptq": "scales", "bnb8": "SCB"}.get(info.layout, "weight_scale")
    scales = read_stored(info.parts[name]).float()
    if not scales.isfinite().all():
        raise _wrong(info, f"a {name} that is not a finite number")
    height = info.shape[0]
    if info.layout in ("awq", "gptq"):
        return scales.t().contiguous()
    if info.layout == "bnb8":
        return scales.view(-1, 1) / 127
    return scales.expand(height, 1) if scales.numel() == 1 else scales.view(height, -1)


def _zeros(info: QuantizedTensor) -> Tensor | None:
    """uint8 [N, groups]; None where all are in the middle of the levels."""
    height, parts = info.shape[0], info.parts
    if info.layout == "awq":
        return _awq_levels(read_stored(parts["qzeros"])).t().contiguous()
    if info.layout == "gptq":
        # The first version stores them less one, modulo the number of levels.
        shifted = _levels(read_stored(parts["qzeros"]), info.bits) + info.zero_shift
        zeros: Tensor = shifted & 2**info.bits - 1
        return zeros.t().contiguous()
    if (stored := parts.get("weight_zero_point")) is None:
        # Levels of two bits are kept in four.
        return None
    if info.layout == "packed":
        words = read_stored(stored).t().contiguous()
        return _levels(words, info.bits).t()[:height].contiguous()
    zeros = _unsigned(read_stored(stored))
    return zeros.expand(height, 1) if zeros.numel() == 1 else zeros.view(height, -1)


def _groups(info: QuantizedTensor) -> Tensor | None:
    """The group of each column [K], int64; None where they are in order."""
    stored = info.parts.get("g_idx") or info.parts.get("weight_g_idx")
    if stored is None:
        return None
    groups, (_, width) = read_stored(stored).long(), info.shape
    plain = torch.arange(width) // info.group
    # compressed-tensors fills it with -1 where there is no other order.
    if groups.equal(plain) or groups.eq(-1).all():
        return None
    if not 0 <= int(groups.min()) <= int(groups.max()) <= int(plain[-1]):
        raise _wrong(info, "a g_idx that names no group")
    if groups.bincount(minlength=width // info.group).ne(info.group).any():
        raise _wrong(info, "groups of different lengths")
    return groups


def _wrong(info: QuantizedTensor, what: str) -> CheckpointError:
    return CheckpointError(
        f"{info.file} has {what} in a quantised matrix of shape {[*info.shape]}; download it "
        "again or use the unquantised checkpoint"
    )
