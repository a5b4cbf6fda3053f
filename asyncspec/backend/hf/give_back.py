"""Freed memory, given back to the operating system."""

from __future__ import annotations

import ctypes

LARGE = 16 << 20
"""Bytes from which on it is worth the milliseconds."""


class Freed:
    """What was freed and may still be in the process: never more than ``LARGE`` bytes.

    Tensors below 32 MiB come from the C library's heap, which shrinks from the end only: without
    this, one small thing that outlives a session keeps the session's cache in the process. Caches
    of short sessions count together, for a stage may hold a hundred of them.
    """

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, count: int) -> None:
        """So many bytes more are free: tell the C library, where it can be told (glibc) and enough
        has come together."""
        self._bytes += count
        if self._bytes < LARGE:
            return
        self._bytes = 0
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
