"""Hidden states, taps and features of a toy model as bytes and back."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import cast

from asyncspec.backend.base import WireTensor
from asyncspec.jobs import Rows


def feature(values: Sequence[int]) -> bytes:
    """Tapped hidden states as the one thing a source reads."""
    return struct.pack(f"<{len(values)}Q", *values)


def pack(rows: Rows) -> WireTensor:
    """Rows of any kind as uint64: [n, 1], with taps [n, 1 + taps, 1], features [n, F]."""
    handle = cast("Sequence[int | tuple[int, ...] | bytes]", rows.handle)
    some = [handle[row] for row in rows.rows]
    data = b"".join(
        row if isinstance(row, bytes) else feature(row if isinstance(row, tuple) else (row,))
        for row in some
    )
    width = len(data) // 8 // len(some)
    shape = (len(some), width, 1) if isinstance(some[0], tuple) else (len(some), width)
    return WireTensor(dtype="uint64", shape=shape, data=memoryview(data))


def unpack(tensor: WireTensor) -> tuple[tuple[int, ...], ...]:
    """All numbers of each row. Raises ``ValueError`` for something else."""
    width = math.prod(tensor.shape[1:])
    if tensor.dtype != "uint64" or tensor.data.nbytes != 8 * width * tensor.shape[0]:
        raise ValueError(f"{tensor.dtype} {tensor.shape} in a toy pipeline")
    return tuple(struct.iter_unpack(f"<{width}Q", tensor.data))
