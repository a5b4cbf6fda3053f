"""Tensors of a GGUF file as numbers, by llama.cpp's own conversions."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.llama.gguf_file import BLOCKS, Tensor
from asyncspec.plugins.llama.library import bindings

_NUMBERS = 4 << 20
"""Converted at a time, so that no second copy of a large tensor is in memory."""

_TO_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class _Traits(ctypes.Structure):
    """``ggml_type_traits``"""

    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", _TO_FLOAT),
        ("from_float_ref", ctypes.c_void_p),
    ]


def dequantized(tensor: Tensor) -> npt.NDArray[np.float16]:
    """A matrix [height, width]. Raises ``CheckpointError`` where it cannot be read."""
    width, height = tensor.shape
    numbers = np.empty((height, width), np.float16)
    step = max(1, _NUMBERS // width)
    assert tensor.file is not None
    try:
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.offset)
            for start in range(0, height, step):
                rows = numbers[start : start + step]
                data = stream.read(tensor.size // height * len(rows))
                rows[:] = _floats(tensor.type, data, rows.size).reshape(rows.shape)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{tensor.file} cannot be read ({error})") from error
    return numbers


def _floats(kind: str, data: bytes, count: int) -> npt.NDArray[np.float32]:
    number, block, size = BLOCKS[kind]
    if len(data) != count // block * size:
        raise ValueError("it has become shorter")
    if kind == "F32":
        return np.frombuffer(data, np.float32)
    traits_of = bindings()._lib.ggml_get_type_traits
    traits_of.restype = ctypes.POINTER(_Traits)
    values = np.empty(count, np.float32)
    traits_of(number).contents.to_float(data, values.ctypes.data, count)
    return values
