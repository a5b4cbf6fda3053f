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
    """Count freed bytes; return the heap's free memory to the operating system (``malloc_trim``,
    glibc only) once there are ``TRIM_BYTES``.

    Tensors below 32 MiB come from the C library's heap, which shrinks from its end only: without
    this, one small object that outlives a session keeps the session's cache in the process. Caches
    of short sessions count together, since a stage may hold a hundred of them.
    """
    global _freed
    _freed += count
    if _freed < TRIM_BYTES:
        return
    _freed = 0
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
