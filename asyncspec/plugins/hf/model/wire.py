"""Hidden states and features as bytes and back; numpy has no bfloat16, so tensors are bytes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asyncspec.backend.tree_stage import check_hidden_states
from asyncspec.core.jobs import TensorRows
from asyncspec.core.tensors import WireTensor
from asyncspec.plugins.hf.kernels.cpu.half_precision import max_abs
from asyncspec.plugins.hf.kernels.cpu.linear import type_name


def to_wire(rows: TensorRows) -> WireTensor:
    """Rows of hidden states [n, H] or [n, 1 + captured, H], or of features [n, F]. Copies only
    where rows are left out; a stage never writes to hidden states it has returned."""
    tensor = select(rows)
    values = tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
    data = values.numpy().data.cast("B")
    return WireTensor(type_name(tensor.dtype), tuple(tensor.shape), data)


def select(rows: TensorRows) -> Tensor:
    """The rows as one contiguous tensor [n, ...]."""
    tensor = rows.handle
    if not isinstance(tensor, Tensor):
        raise TypeError(f"hidden states of another backend: {type(tensor).__name__}")
    if len(rows.rows) != tensor.shape[0]:  # rows ascend, so otherwise it is all of them
        tensor = tensor[torch.tensor(rows.rows)]
    return tensor.contiguous()


class FeatureTensors:
    """``Tensors`` of a node that only passes features on: of any number of depths [n, k * H]."""

    def __init__(self, dtype: torch.dtype, hidden_size: int) -> None:
        self._dtype, self._hidden_size = dtype, hidden_size

    def pack(self, rows: TensorRows) -> WireTensor:
        return to_wire(rows)

    def unpack(self, tensor: WireTensor) -> object:
        width = tensor.shape[-1] if tensor.shape else 0
        if width % self._hidden_size:
            raise ValueError(f"features of {width} columns, expected {self._hidden_size} a depth")
        return from_wire(tensor, self._dtype, width)


def from_wire(
    wire: WireTensor, dtype: torch.dtype, width: int, *, captured: bool = False
) -> Tensor:
    """Hidden states [n, width] or, if ``captured``, [n, 1 + k, width]. Raises ``ValueError``."""
    check_hidden_states(wire, type_name(dtype), width, (2, 3) if captured else (2,))
    # A buffer that is read-only, or reused, must not be shared with a tensor.
    data = bytearray(wire.data) if wire.data.readonly else wire.data
    tensor = torch.frombuffer(data, dtype=dtype).view(wire.shape)
    # One pass without a mask; a NaN is the least and the greatest. bfloat16's sum takes 15 times as
    # long without AVX-512.
    if not math.isfinite(max_abs(tensor)):
        raise ValueError("hidden states with numbers that are not finite")
    return tensor
