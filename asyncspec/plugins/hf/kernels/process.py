"""Process-wide state of libraries: log output of transformers, free memory of the C heap."""

from __future__ import annotations

import ctypes


def quiet_transformers() -> None:
    """No progress bars and load reports of transformers in this process from now on."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


TRIM_BYTES = 16 << 20
"""Freed bytes from which on a trim of the heap is worth the milliseconds it takes."""

_freed = 0


def free_heap(count: int) -> None:
    """Count freed bytes; from ``TRIM_BYTES`` on return free memory to the system (``malloc_trim``).

    Tensors below 32 MiB come from the C heap, which shrinks from its end only: a small object that
    outlives a session keeps the session's cache. Caches of short sessions count together.
    """
    global _freed
    _freed += count
    if _freed < TRIM_BYTES:
        return
    _freed = 0
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
