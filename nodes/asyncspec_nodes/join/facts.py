"""What a machine is: memory for stages, and how fast its passes read weights."""

from __future__ import annotations

import time

from asyncspec_nodes.node.resources import available_bytes

MEMORY_SHARE = 0.9
"""Of what is free: the system and other programs need some."""

_ROWS, _WIDTH = 4096, 4096
_TRIALS = 4


def free_memory() -> int:
    """Bytes that stages may take."""
    return int(MEMORY_SHARE * available_bytes())


def read_speed() -> float:
    """Bytes a second of a matrix of 64 MiB, times a vector: what bounds a pass of few rows."""
    import numpy as np

    matrix = np.ones((_ROWS, _WIDTH), np.float32)
    vector = np.ones(_WIDTH, np.float32)
    best = float("inf")
    for _ in range(_TRIALS):
        start = time.perf_counter()
        matrix @ vector
        best = min(best, time.perf_counter() - start)
    return matrix.nbytes / max(1e-9, best)
