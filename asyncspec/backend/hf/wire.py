"""Hidden states and features as bytes and back. bfloat16 has no name in numpy, so bytes are viewed
as bytes."""

from __future__ import annotations

import math

import torch

from asyncspec.backend.base import WireTensor
from asyncspec.core.jobs import TensorRows

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def to_wire(rows: TensorRows) -> WireTensor:
    """Some rows of hidden states [n, H] or [n, 1 + taps, H], or of features [n, F]. Copies only
    where rows are left out; a stage never writes to hidden states it has handed out."""
    tensor = select(rows)
    data = tensor.view(torch.uint8).numpy().data.cast("B")
    return WireTensor(dtype=NAMES[tensor.dtype], shape=tuple(tensor.shape), data=data)


def select(rows: TensorRows) -> torch.Tensor:
    """The rows as one contiguous tensor [n, ...]."""
    tensor = rows.handle
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"hidden states of another backend: {type(tensor).__name__}")
    if len(rows.rows) != tensor.shape[0]:  # they ascend, so else it is all of them
        tensor = tensor[torch.tensor(rows.rows)]
    return tensor.contiguous()


def from_wire(
    wire: WireTensor, dtype: torch.dtype, width: int, *, taps: bool = False
) -> torch.Tensor:
    """Received hidden states [n, width], where ``taps`` may be also [n, 1 + taps, width]. Raises
    ``ValueError`` where they are something else."""
    if wire.dtype != NAMES[dtype]:
        raise ValueError(f"hidden states of type {wire.dtype}, expected {NAMES[dtype]}")
    dimensions = (2, 3) if taps else (2,)
    if len(wire.shape) not in dimensions or wire.shape[-1] != width or min(wire.shape) < 1:
        raise ValueError(f"hidden states of shape {wire.shape}, expected (n, {width})")
    size = math.prod(wire.shape) * dtype.itemsize
    if wire.data.nbytes != size:
        raise ValueError(f"hidden states of {wire.data.nbytes} bytes, expected {size}")
    # A buffer that may not be written to, or is reused, must not be shared with a tensor.
    data = bytearray(wire.data) if wire.data.readonly else wire.data
    tensor = torch.frombuffer(data, dtype=dtype).view(wire.shape)
    # A sum is finite only where all of its terms are; one pass, and no mask of them.
    if not math.isfinite(tensor.sum(dtype=torch.float32)):
        raise ValueError("hidden states with numbers that are not finite")
    return tensor
