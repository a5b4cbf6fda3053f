"""Linear layers of 4- and 8-bit levels by onnxruntime's MatMulNBits, which quantises rows to 8 bits
by the block (``accuracy_level`` 4) and multiplies integers.

A block's sum is exact in any order, and with an even number of rows every row meets the same
kernel; an odd last one may meet another, which adds the blocks up otherwise and on AVX2 has
multiplied asymmetric levels wrongly (onnxruntime issue 29853). So rows are padded to even
numbers. Whether that is enough on this CPU is tried before it is relied on, and every product is
compared with that of dequantised weights. Otherwise torch's kernels are used (``quantized.py``).
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from asyncspec.plugins.hf.checkpoint.packed import PackedMatrix, ReadRows, quantize, row_slices
from asyncspec.plugins.hf.kernels.cpu.linear import RowwiseLinear
from asyncspec.plugins.hf.kernels.cpu.ort import (
    Graph,
    GraphError,
    WaitingLinear,
    import_onnxruntime,
    packed_scale_bytes,
)
from asyncspec.plugins.hf.kernels.cpu.quantized import (
    Int4Linear,
    Int8Linear,
    PackedInt4Linear,
    group_of,
    int4_bytes,
    int8_bytes,
)
from asyncspec.plugins.hf.kernels.probing import noise

BLOCK = 128
"""Columns that share a scale, where a row is whole blocks of them. Blocks of 32 have a sixth less
error and take 1.4 times as long (docs/results/quantisation.md)."""

_SHORTER_BLOCKS = (64, 32)

ROW_MULTIPLE = 2

_TOLERANCE = 0.03
"""Largest error next to dequantised weights, as a share of the norm that products of noise have on
average: that of the product at hand is small where terms cancel, as they may in a matrix of one
row. Rows quantised to 8 bits have .7 %, outliers a hundred times larger 2 %."""

_ROUNDING = 1e-6
"""Relative rounding of float32 sums of a block."""

_CHECKED_ROWS = 256
"""Output channels that are compared."""

_PROBE = (48, 640)
"""Rows and columns of the matrix that this CPU is tried with."""


class NBitsLinear(RowwiseLinear):
    """A ``PackedMatrix`` and a bias [N] or None for rows of ``dtype``. onnxruntime packs a copy;
    the matrix may be freed. Raises ``GraphError`` where the product is not that of the dequantised
    weights."""

    any_rows = True
    row_multiple = ROW_MULTIPLE

    def __init__(self, packed: PackedMatrix, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(packed.shape, dtype, bias)
        self._description = describe(packed)
        graph = Graph()
        self._run = graph.compile([graph.block_product("x", packed)], ["x"])
        self._weight_bytes = graph.weight_bytes
        self._check(packed)

    def product(self, x: Tensor) -> Tensor:
        y = self._multiply(x)
        return (y if self.bias is None else y.add_(self.bias)).to(self.dtype)

    def unrounded_product(self, x: Tensor) -> Tensor:
        """See ``RowwiseLinear``; of any number of rows [n, K]."""
        return self.in_padded_rows(self._multiply, x)

    def _multiply(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] float32, without bias."""
        (y,) = self._run({"x": x.float().contiguous().numpy()})
        return torch.from_numpy(y)

    def _check(self, packed: PackedMatrix) -> None:
        x, weight = noise(ROW_MULTIPLE, self.in_features), packed.read(0, _CHECKED_ROWS)
        off = self._multiply(x)[:, :_CHECKED_ROWS] - x @ weight.T
        usual = x.norm() * weight.norm() / math.sqrt(self.in_features)
        # Error of rounding alone, where weights are zeros.
        least = _ROUNDING * 2**packed.bits * packed.scales[:_CHECKED_ROWS].norm() * x.norm()
        if not off.norm() <= _TOLERANCE * usual + least:
            raise GraphError("MatMulNBits is not the product of the dequantised weights")

    @property
    def description(self) -> str:
        return self._description

    @property
    def weight_bytes(self) -> int:
        return self._weight_bytes


class WaitingNBits(WaitingLinear):
    """A ``PackedMatrix`` that waits to be packed in a layer's graph or by itself. Until then it
    multiplies dequantised weights, which those are compared with."""

    def __init__(self, packed: PackedMatrix, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(packed.shape, dtype, bias)
        self._packed = packed

    row_multiple = ROW_MULTIPLE

    def add_to(self, graph: Graph, x: str) -> str:
        bias = None if self.bias is None else self.bias.float()
        return graph.block_product(x, self._packed, bias)

    def pack(self) -> RowwiseLinear:
        return packed_linear(self._packed, self.bias, self.dtype)

    def product(self, x: Tensor) -> Tensor:
        wide = x.float()
        parts = [wide @ self._packed.read(*some).T for some in row_slices(self._packed.shape)]
        y = torch.cat(parts, -1)
        return (y if self.bias is None else y.add_(self.bias)).to(self.dtype)

    @property
    def description(self) -> str:
        return describe(self._packed)

    @property
    def weight_bytes(self) -> int:
        return self._packed.bytes_held


def describe(packed: PackedMatrix) -> str:
    """How a matrix is kept, for users."""
    return f"int{packed.bits} in blocks of {packed.block}"


@cache
def multiplies_levels() -> bool:
    """Whether onnxruntime is installed and gives rows, padded to even numbers, the same bits
    among any others, for the products of 4 and 8 bits that we quantise to."""
    try:
        import_onnxruntime()
        return all(_is_rowwise(bits) for bits in (4, 8))
    except (ImportError, GraphError):
        return False


def _is_rowwise(bits: int) -> bool:
    weight = noise(*_PROBE)
    packed = quantize(lambda first, end: weight[first:end], _PROBE, bits, BLOCK)
    linear, x = NBitsLinear(packed, None, torch.float32), noise(33, _PROBE[1])
    want = linear.unrounded_product(x)
    counts = (1, 2, 3, 4, 5, 8, 17, 32)
    return all(torch.equal(linear.unrounded_product(x[:n]), want[:n]) for n in counts)


def packed_linear(packed: PackedMatrix, bias: Tensor | None, dtype: torch.dtype) -> RowwiseLinear:
    """A linear layer of quantised weights [N, K] and a bias [N] or None, for rows of ``dtype``, by
    the best kernel that this CPU has. Where that is torch's, scales are rounded to bfloat16, and 8
    bits to a scale for each channel."""
    if multiplies_levels():
        try:
            return NBitsLinear(packed, bias, dtype)
        except GraphError:
            pass  # a shape that it does not multiply rightly here
    if PackedInt4Linear.takes(packed):
        return PackedInt4Linear(packed, dtype, bias)
    kind = Int4Linear if packed.bits == 4 else Int8Linear
    return kind(packed.shape, packed.read, dtype, bias)


def block_of(width: int) -> int:
    """Columns that share a scale in rows of ``width``."""
    return next((n for n in (BLOCK, *_SHORTER_BLOCKS) if width % n == 0), _SHORTER_BLOCKS[-1])


# --- Dense weights, rounded as they are read.


def quantized_linear(
    name: str,
    bits: int,
    shape: tuple[int, ...],
    read: ReadRows,
    dtype: torch.dtype,
    bias: Tensor | None,
) -> RowwiseLinear:
    """The layer ``name`` of weights [N, K] rounded to 4 or 8 bits, for rows of ``dtype``. One of
    onnxruntime's waits to be packed (``WaitingNBits``)."""
    if uses_levels(name):
        return WaitingNBits(quantize(read, shape, bits, block_of(shape[1])), bias, dtype)
    return (Int4Linear if bits == 4 else Int8Linear)(shape, read, dtype, bias)


def quantized_bytes(name: str, bits: int, height: int, width: int) -> int:
    """Memory of its weights once packed."""
    if uses_levels(name):
        return packed_bytes(height, width, bits, block_of(width), symmetric=bits == 8)
    return int4_bytes(height, width, group_of(width)) if bits == 4 else int8_bytes(height, width)


def uses_levels(name: str) -> bool:
    """Whether onnxruntime multiplies the layer ``name``. Not experts: a model may have ten
    thousand, and each session takes 3 ms to make and .2 MiB."""
    return ".experts." not in name and multiplies_levels()


def packed_bytes(height: int, width: int, bits: int, block: int, *, symmetric: bool) -> int:
    """Memory of an ``NBitsLinear`` of a matrix [height, width], without bias."""
    blocks = -(-width // block)
    zeros = 0 if symmetric else height * -(-blocks * bits // 8)
    # Scales are ours as well as onnxruntime's.
    scales = 4 * height * blocks + packed_scale_bytes(height * blocks)
    return height * blocks * block * bits // 8 + scales + zeros
