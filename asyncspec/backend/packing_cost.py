"""What it costs on this machine to pack rows and to unpack them again."""

from __future__ import annotations

import time

import numpy as np

from asyncspec.backend.base import WireTensor
from asyncspec.backend.packed import pack, unpack

ROWS, WIDTH = 16, 4096
"""Of the sample: a segment of a 7B model."""

TIMES = 8


def packing_seconds() -> float:
    """Seconds that packing and unpacking take for each byte of a plain tensor, by a sample, which
    takes some 5 ms. Other work on the machine makes it slower now and then, nothing faster: the
    quickest of some counts. The peer that unpacks is taken to be as fast."""
    values = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
    data = (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8).reshape(-1).data
    plain = WireTensor("bfloat16", (ROWS, WIDTH), data)
    taken = []
    for _ in range(TIMES):
        begun = time.perf_counter()
        unpack(pack(plain))
        taken.append(time.perf_counter() - begun)
    return min(taken) / plain.data.nbytes
