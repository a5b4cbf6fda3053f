"""Tensors of safetensors files as they are stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.hf.checkpoint.files.headers import TensorInfo

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Types of weights, by safetensors' names."""

_CODE_DTYPES = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    # Exponents alone: torch has a type for them from 2.7 on.
    "F8_E8M0": torch.uint8,
}
"""Types of what quantised matrices are made of."""


def torch_dtype(info: TensorInfo) -> torch.dtype:
    """The type a tensor is stored in. Raises ``CheckpointError`` for one that is not read."""
    dtype = TORCH_DTYPES.get(info.dtype) or _CODE_DTYPES.get(info.dtype)
    if dtype is None:
        raise CheckpointError(f"{info.file} holds {info.dtype} numbers, which are not read")
    return dtype


def read_stored(info: TensorInfo) -> Tensor:
    """One tensor in memory of its own. Raises ``CheckpointError``."""
    tensor = torch.empty(info.shape, dtype=torch_dtype(info))
    try:
        with info.file.open("rb") as stream:
            stream.seek(info.offset)
            count = stream.readinto(tensor.reshape(-1).view(torch.uint8).numpy().data)
    except OSError as error:
        raise CheckpointError(f"{info.file} cannot be read ({error})") from error
    if count < info.size:
        raise CheckpointError(f"{info.file} is shorter than its header says")
    return tensor


def read_stored_rows(info: TensorInfo, first: int, end: int) -> Tensor:
    """Elements [first, end) of the first dimension."""
    row = info.size // info.shape[0]
    shape = (end - first, *info.shape[1:])
    offset, size = info.offset + first * row, (end - first) * row
    return read_stored(replace(info, offset=offset, size=size, shape=shape))


def read_stored_columns(info: TensorInfo, first: int, end: int) -> Tensor:
    """Columns [first, end) of a matrix of int32 [n, m], contiguous. The file is mapped, as reading
    whole rows of it for each few columns would take as many times as long."""
    try:
        mapped: Any = np.memmap(info.file, np.int32, "r", info.offset, info.shape)
    except (OSError, ValueError) as error:  # ValueError: the file has become shorter
        raise CheckpointError(f"{info.file} cannot be read ({error})") from error
    return torch.from_numpy(mapped[:, first:end].copy())
