"""What it costs on this machine to pack rows and to unpack them again."""

from __future__ import annotations

import time

import numpy as np

from asyncspec.backend.base import WireTensor
from asyncspec.backend.row_compression import pack, unpack

ROWS, WIDTH = 8, 4096
"""Of the sample: a short segment of a 7B model. The more rows, the less a byte costs; a single row
has some four times this cost, and 64 rows half of it."""

TIMES = 8


def packing_seconds() -> float:
    """Seconds that packing and unpacking take for each byte of a plain tensor, by a sample, which
    takes some 5 ms. Other work on the machine makes it slower now and then, nothing faster: the
    quickest of some counts. The peer that unpacks is taken to be as fast. Channels differ by up to
    ten times, since values outside the first window take time."""
    rng = np.random.default_rng(0)
    scales = 10 ** rng.random(WIDTH)
    values = (rng.standard_normal((ROWS, WIDTH)) * scales).astype(np.float32)
    data = (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8).reshape(-1).data
    plain = WireTensor("bfloat16", (ROWS, WIDTH), data)
    taken = []
    for _ in range(TIMES):
        begun = time.perf_counter()
        unpack(pack(plain))
        taken.append(time.perf_counter() - begun)
    return min(taken) / plain.data.nbytes
