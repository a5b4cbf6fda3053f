"""Linear layers for the device that a model computes on."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from msgspec.structs import replace
from torch import Tensor

from asyncspec.backend.base import Quantize
from asyncspec.plugins.hf.checkpoint.checkpoint import read_rows, read_tensor, row_spans
from asyncspec.plugins.hf.checkpoint.files.headers import TensorInfo
from asyncspec.plugins.hf.checkpoint.formats.levels import (
    is_reordered,
    packed_bits,
    packed_block,
    read_packed,
)
from asyncspec.plugins.hf.checkpoint.formats.tensors import QuantizedTensor
from asyncspec.plugins.hf.kernels.accelerator.int4 import GROUPS, int4_bytes
from asyncspec.plugins.hf.kernels.accelerator.linear import FAST_BUCKETS, DenseDeviceLinear
from asyncspec.plugins.hf.kernels.accelerator.quantized import packed_linear, quantized_linear
from asyncspec.plugins.hf.kernels.cpu.capabilities import FAST, KernelSettings
from asyncspec.plugins.hf.kernels.cpu.dense import dense_linear, weight_dtype
from asyncspec.plugins.hf.kernels.cpu.linear import RowwiseLinear
from asyncspec.plugins.hf.kernels.device import Device


def fast_settings(device: Device) -> KernelSettings:
    """Settings of ``fast`` mode and of draft models."""
    return replace(FAST, buckets=FAST_BUCKETS) if device.is_accelerator else FAST


def kept_dtype(stored: torch.dtype | None, dtype: torch.dtype, *, accelerator: bool) -> torch.dtype:
    """The type in which weights that are ``stored`` so are kept for rows of ``dtype``."""
    return dtype if accelerator else weight_dtype(stored, dtype)


def read_to(device: Device, info: TensorInfo, dtype: torch.dtype) -> Tensor:
    """A tensor on the device; of a matrix some rows at a time are on the host."""
    if not device.is_accelerator or info.transposed or not info.shape:
        return device.put(read_tensor(info, dtype))
    tensor = torch.empty(info.shape, dtype=dtype, device=device.torch)
    for first, end in row_spans(info):
        tensor[first:end] = device.put(read_rows(info, first, end)).to(dtype)
    return tensor


def device_linear(
    info: TensorInfo, bias: Tensor | None, dtype: torch.dtype, quantize: Quantize, device: Device
) -> RowwiseLinear:
    """A stored matrix on an accelerator."""
    if isinstance(info, QuantizedTensor) and info.is_levels:
        matrix, order = read_packed(info)
        if order is None:
            return packed_linear(matrix, dtype, bias, device)
    if quantize == "none":
        return DenseDeviceLinear(read_to(device, info, dtype), bias)
    return quantized_linear(quantize, info.shape, partial(read_rows, info), dtype, bias, device)


def device_levels_bytes(info: QuantizedTensor, bits: Collection[int]) -> int | None:
    """Memory of a matrix of levels on an accelerator that is known to multiply ``bits``; None where
    it is kept dense."""
    (height, width), block, kept = info.shape, packed_block(info), packed_bits(info)
    if kept not in bits or (kept == 4 and block not in GROUPS) or is_reordered(info):
        return None
    if kept == 4:
        return int4_bytes(height, width, block)
    # Levels, scales in float32 and zero points.
    return height * -(-width // block) * (block + 4 + 1)


def linear_of(
    weight: Tensor, bias: Tensor | None, dtype: torch.dtype, device: Device
) -> RowwiseLinear:
    """A dense matrix of a draft: its bits may depend on the number of rows."""
    if not device.is_accelerator:
        return dense_linear(weight, bias, FAST, dtype)
    return DenseDeviceLinear(
        device.put(weight).to(dtype), None if bias is None else device.put(bias)
    )
