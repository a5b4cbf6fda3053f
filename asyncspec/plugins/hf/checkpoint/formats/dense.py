"""Published formats whose numbers are no levels at equal distances, as dense rows: FP8, FP4 (OCP
Microscaling Formats 1.0, NVFP4) and bitsandbytes in four bits."""

from __future__ import annotations

import math

import torch
from msgspec.structs import replace
from torch import Tensor

from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.hf.checkpoint.files.stored import read_stored, read_stored_rows
from asyncspec.plugins.hf.checkpoint.formats.levels import Levels
from asyncspec.plugins.hf.checkpoint.formats.tensors import QuantizedTensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of E8M0
_NO_NUMBER = 255


def quantized_rows(info: QuantizedTensor, first: int, end: int) -> Tensor:
    """Rows [first, end) of a matrix, as float32. Raises ``CheckpointError``
    where a number is not finite."""
    if info.is_levels:
        rows = Levels(info).rows(first, end)
    elif info.layout == "fp8":
        rows = _fp8(info, first, end)
    elif info.layout == "bnb4":
        rows = _bitsandbytes(info, first, end)
    else:
        rows = _fp4(info, first, end)
    if not all(math.isfinite(float(x)) for x in rows.aminmax()):
        raise CheckpointError(
            f"{info.file} has numbers that are not finite in a quantised matrix of shape "
            f"{[*info.shape]}; download it again or use the unquantised checkpoint"
        )
    return rows


def _fp8(info: QuantizedTensor, first: int, end: int) -> Tensor:
    weights = read_stored_rows(info.parts["weight"], first, end).float()
    scales = _numbers(read_stored(info.parts["weight_scale"]))
    rows, columns = info.block
    scales = scales.view(-(-info.shape[0] // rows), -1)
    by_row = scales[torch.arange(first, end) // rows].unsqueeze(-1)
    width = info.shape[1]
    if width % columns:  # the last block of a row is shorter
        return weights.mul_(by_row.expand(-1, -1, columns).flatten(1)[:, :width])
    return weights.view(end - first, -1, columns).mul_(by_row).flatten(1)


def _fp4(info: QuantizedTensor, first: int, end: int) -> Tensor:
    codes = read_stored_rows(info.parts[_codes(info)], first, end).flatten(1)
    table = torch.tensor([*_E2M1, *(-x for x in _E2M1)])
    numbers = _looked_up(_pairs(table), codes).view(end - first, -1, info.group)
    return numbers.mul_(_fp4_scales(info, first, end).unsqueeze(-1)).flatten(1)


def _codes(info: QuantizedTensor) -> str:
    return "blocks" if info.layout == "mxfp4" else "weight_packed"


def _fp4_scales(info: QuantizedTensor, first: int, end: int) -> Tensor:
    """float32 [n, K / group]."""
    name = "scales" if info.layout == "mxfp4" else "weight_scale"
    stored = read_stored_rows(info.parts[name], first, end)
    if (divisor := info.parts.get("weight_global_scale")) is not None:
        return stored.float() / read_stored(divisor).float()
    return _numbers(stored)


def _numbers(scales: Tensor) -> Tensor:
    """Scales as float32; bytes are exponents alone (E8M0)."""
    if scales.dtype != torch.uint8:
        return scales.float()
    numbers = (scales.float() - _BIAS).exp2()
    return torch.where(scales == _NO_NUMBER, torch.nan, numbers)


def _bitsandbytes(info: QuantizedTensor, first: int, end: int) -> Tensor:
    width, (block, nested) = info.shape[1], info.block
    start, stop = first * width, end * width
    stored = info.parts["weight"]
    codes = read_stored_rows(replace(stored, shape=(stored.size,)), start // 2, stop // 2)
    pairs = _pairs(read_stored(info.parts["weight.quant_map"]))
    # The first number of a pair is in the high half.
    numbers = _looked_up(pairs.flip(-1), codes).flatten()
    # The blocks that the rows touch.
    low, high = start // block, -(-stop // block)
    largest = read_stored_rows(info.parts["weight.absmax"], low, high)
    if largest.dtype == torch.uint8:
        names = (info.parts["weight.nested_quant_map"], info.parts["weight.nested_absmax"])
        table, outer = map(read_stored, names)
        outer = outer[torch.arange(low, high) // nested]
        largest = table[largest.int()] * outer + info.offset_of_scales
    at = torch.arange(start - low * block, stop - low * block, dtype=torch.int32)
    at = at.div_(block, rounding_mode="floor")
    return numbers.mul_(largest.index_select(0, at)).view(end - first, width)


def _pairs(table: Tensor) -> Tensor:
    """What the low and the high half of each byte stand for, [256, 2], of ``table`` [16]."""
    codes = torch.arange(256)
    return torch.stack([table[codes & 15], table[codes >> 4]], -1)


def _looked_up(pairs: Tensor, codes: Tensor) -> Tensor:
    """Bytes [n...] -> two numbers each, [n..., 2]."""
    return pairs.index_select(0, codes.flatten().int())
