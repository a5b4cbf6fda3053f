"""Quantised weights on an accelerator: by products for the device where there are any, else as
dense weights of the rounded values.

torch's are private operators, which differ between its releases and devices, so each is tried on a
small matrix before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache, partial

import torch
from torch import Tensor

from asyncspec.backend.base import Quantize
from asyncspec.core.errors import first_line
from asyncspec.plugins.hf.checkpoint.packed import (
    PackedMatrix,
    ReadRows,
    quantize,
    row_slices,
    unpack_levels,
)
from asyncspec.plugins.hf.kernels.accelerator.int4 import (
    GROUPS,
    Int4Product,
    agrees,
    int4_bytes,
    pack_int4,
)
from asyncspec.plugins.hf.kernels.accelerator.linear import DenseDeviceLinear, DeviceLinear
from asyncspec.plugins.hf.kernels.cpu.linear import type_name
from asyncspec.plugins.hf.kernels.cpu.quantized import quantize_int8
from asyncspec.plugins.hf.kernels.device import Device
from asyncspec.plugins.hf.kernels.probing import noise

BLOCK = 64
"""Weights of our own int4 that share a scale; half as many where that fits the inner width."""

_TOLERANCE = 0.02
"""Error of a product in bfloat16 that is allowed, relative to its largest number."""

_INT4_BLOCKS = (32, 64, 128, 256)
_INNER_TILES = 2
"""Torch's int4 layout has inner widths that are multiples of 16 times this."""

_TRIED = (64, 128)
"""Rows and columns of a matrix that a product is tried with."""

Product = Callable[[Tensor], Tensor]
"""x [n, K] -> [n, N] of the same type."""


class QuantizedDeviceLinear(DeviceLinear):
    """Weights [N, K] multiplied by a product of the device."""

    def __init__(
        self,
        shape: tuple[int, int],
        multiply: Product,
        held: tuple[str, int],
        dtype: torch.dtype,
        bias: Tensor | None,
        device: Device,
        multiplied: torch.dtype = torch.bfloat16,
    ) -> None:
        """``held``: how the weights are kept, and their bytes. ``multiplied``: what ``multiply``
        takes."""
        super().__init__(shape, dtype, bias)
        self._multiply = multiply
        self._multiplied = multiplied
        self._held = held
        self._device = device.torch

    @property
    def device(self) -> torch.device:
        return self._device

    def product(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features).to(self._multiplied)
        y = self._multiply(flat).to(x.dtype)
        return (y if self.bias is None else y + self.bias).view(*x.shape[:-1], -1)

    @property
    def description(self) -> str:
        return self._held[0]

    @property
    def weight_bytes(self) -> int:
        return self._held[1]


class RoundedLinear(DenseDeviceLinear):
    """Dense weights that were quantised as ``kind`` says."""

    def __init__(self, weight: Tensor, bias: Tensor | None, kind: str) -> None:
        super().__init__(weight, bias)
        self._kind = kind

    @property
    def description(self) -> str:
        kept = type_name(self.dtype)
        return f"{self._kind} as {kept} (no product for it on {self.device.type} in this torch)"


def quantized_linear(
    kind: Quantize,
    shape: tuple[int, ...],
    read: ReadRows,
    dtype: torch.dtype,
    bias: Tensor | None,
    device: Device,
) -> DeviceLinear:
    """A dense matrix [N, K] in a file, read, moved and rounded some rows at a time: int8 with a
    scale for each row, int4 in blocks."""

    def read_there(first: int, end: int) -> Tensor:
        return device.put(read(first, end))

    if kind == "int4":
        block = _block_of(shape[1])
        return packed_linear(quantize(read_there, shape, 4, block), dtype, bias, device)
    return _int8_linear(shape, read_there, dtype, bias, device)


def packed_linear(
    matrix: PackedMatrix, dtype: torch.dtype, bias: Tensor | None, device: Device
) -> DeviceLinear:
    """A quantised matrix of the host."""
    kind, shape = f"int{matrix.bits} in blocks of {matrix.block}", matrix.shape
    multiplied = dtype if dtype == torch.float16 else torch.bfloat16
    if matrix.bits == 4 and (kernel := _int4_kernel(device, multiplied, matrix.block)) is not None:
        weights = pack_int4(matrix, device.torch)
        return QuantizedDeviceLinear(
            shape,
            partial(kernel, weights=weights),
            (kind, weights.bytes_held),
            *(dtype, bias, device, multiplied),
        )
    if (multiply := _packed_product(matrix, device)) is not None:
        held = (kind, matrix.bytes_held)
        return QuantizedDeviceLinear(shape, multiply, held, dtype, bias, device)
    dense = torch.empty(shape, dtype=dtype, device=device.torch)
    for first, end in row_slices(shape):
        dense[first:end] = device.put(matrix.read(first, end))
    return RoundedLinear(dense, bias, kind)


@cache
def has_product(kind: Quantize, device: Device) -> bool:
    """Whether this torch multiplies ``kind`` on the device as it should."""
    dense, x = noise(*_TRIED), noise(16, _TRIED[1], seed=1)
    try:
        if kind == "int4":
            matrix = quantize(lambda first, end: dense[first:end], _TRIED, 4, BLOCK)
            rounded, multiply = matrix.dequantized(), _int4_product(matrix, device)
        else:
            levels, scales = quantize_int8(dense)
            rounded = levels.float() * scales.float()[:, None]
            multiply = _int8_product(device.put(levels), device.put(scales), device)
        got = multiply(device.put(x).to(torch.bfloat16)).float().cpu()
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    want = x @ rounded.T
    return bool((got - want).abs().max() <= _TOLERANCE * want.abs().max())


# --- int4: by a kernel of ours, or torch's, in whose layout a weight is (level - 8) * scale +
# offset.


@cache
def _int4_kernel(device: Device, dtype: torch.dtype, block: int) -> Int4Product | None:
    """The device's own for rows of ``dtype``, if it computes what it should."""
    kernel = device.int4_product
    if kernel is None or block not in GROUPS:
        return None
    try:
        if agrees(kernel, device.torch, dtype, block):
            return kernel
        why = "it computes something else"
    except Exception as error:  # a compiler fails in many ways
        why = first_line(error)
    device.kernel_failure = f"for int4: {why}"
    return None


def _fits_int4(matrix: PackedMatrix) -> bool:
    """torch's layout has no padding of its own."""
    rows, columns = matrix.shape
    fits = rows % 8 == 0 and columns % (16 * _INNER_TILES) == 0 and columns % matrix.block == 0
    return matrix.bits == 4 and matrix.block in _INT4_BLOCKS and fits


def _packed_product(matrix: PackedMatrix, device: Device) -> Product | None:
    """torch's own of 4 bits, ours of 8."""
    if _fits_int4(matrix) and has_product("int4", device):
        return _int4_product(matrix, device)
    if not device.has_triton or matrix.bits != 8:
        return None
    from asyncspec.plugins.hf.kernels.accelerator.triton_quantized import multiply_packed

    zero, scales = matrix.zero_points, matrix.scales.float()
    if zero is None:
        zero = torch.full(scales.shape, 128, dtype=torch.uint8)
    values, scales, zero = map(device.put, (matrix.values, scales, zero))
    return lambda x: multiply_packed(x, values, scales, zero, matrix.block)


def _int4_product(matrix: PackedMatrix, device: Device) -> Product:
    if device.torch.type == "cpu":
        raise NotImplementedError("the CPU's layout is another")
    levels = unpack_levels(device.put(matrix.values), 4)
    # Two levels in a byte, the first in its upper half.
    packed = torch._convert_weight_to_int4pack(
        (levels[:, ::2] << 4 | levels[:, 1::2]).contiguous(), _INNER_TILES
    )
    scales, zero = matrix.scales.float(), matrix.zero_points
    offsets = torch.zeros_like(scales) if zero is None else (8 - zero.float()) * scales
    steps = torch.stack([scales, offsets], -1).transpose(0, 1).contiguous()
    steps, block = device.put(steps).to(torch.bfloat16), matrix.block
    return lambda x: torch._weight_int4pack_mm(x, packed, block, steps)


def known_bytes(kind: Quantize, height: int, width: int, bits: Collection[int]) -> int | None:
    """Memory of our own ``kind`` [height, width] on a device that is known to multiply ``bits``;
    None where it may be kept dense."""
    has_product = width % _INT8_WIDTH == 0 if kind == "int8" else 4 in bits
    return quantized_bytes(kind, height, width) if has_product else None


def quantized_bytes(kind: Quantize, height: int, width: int) -> int:
    """Memory of our own ``kind`` [height, width], by a product for it."""
    if kind == "int8":
        return height * (width + torch.bfloat16.itemsize)
    return int4_bytes(height, width, _block_of(width))


def _block_of(width: int) -> int:
    return BLOCK if width % BLOCK == 0 else BLOCK // 2


# --- int8: symmetric, a scale for each row.

_INT8_WIDTH = 32
"""Inner widths that torch's products take are multiples of this."""


def _int8_linear(
    shape: tuple[int, ...],
    read: ReadRows,
    dtype: torch.dtype,
    bias: Tensor | None,
    device: Device,
) -> DeviceLinear:
    height, width = shape
    packs = width % _INT8_WIDTH == 0 and has_product("int8", device)
    kept = torch.empty(height, width, dtype=torch.int8 if packs else dtype, device=device.torch)
    scales = torch.empty(height, dtype=torch.bfloat16, device=device.torch)
    for first, end in row_slices(shape):
        levels, row_scales = quantize_int8(read(first, end).float())
        kept[first:end] = levels if packs else levels.float() * row_scales.float()[:, None]
        scales[first:end] = row_scales
    if not packs:
        return RoundedLinear(kept, bias, "int8")
    held = ("int8", quantized_bytes("int8", height, width))
    return QuantizedDeviceLinear(
        (height, width), _int8_product(kept, scales, device), held, dtype, bias, device
    )


def _int8_product(levels: Tensor, scales: Tensor, device: Device) -> Product:
    if device.has_triton:
        from asyncspec.plugins.hf.kernels.accelerator.triton_quantized import multiply_int8

        return lambda x: multiply_int8(x, levels, scales)
    return lambda x: torch._weight_int8pack_mm(x, levels, scales)
