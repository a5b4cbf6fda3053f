"""Freed memory, given back to the operating system."""

from __future__ import annotations

import ctypes

LARGE = 16 << 20
"""Bytes from which on it is worth the milliseconds."""


def give_back(freed: int) -> None:
    """Return what the C library keeps for later of ``freed`` bytes, where it can (glibc).

    Tensors below 32 MiB come from its heap, which shrinks from the end only: without this, one
    small thing that outlives a session keeps the session's cache in the process.
    """
    if freed < LARGE:
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
