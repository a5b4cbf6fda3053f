"""Process-wide state of libraries: log output of transformers, free memory of the C heap."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Inside, transformers shows no progress bars and no load reports."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


TRIM_BYTES = 16 << 20
"""HeapTrimmer bytes from which on a trim is worth the milliseconds it takes."""


class HeapTrimmer:
    """Returns freed memory to the operating system (``malloc_trim``, glibc only).

    Tensors below 32 MiB come from the C library's heap, which shrinks from its end only: without
    this, one small object that outlives a session keeps the session's cache in the process. Caches
    of short sessions count together, since a stage may hold a hundred of them.
    """

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, count: int) -> None:
        """Count freed bytes, and trim the heap once there are ``TRIM_BYTES``."""
        self._bytes += count
        if self._bytes < TRIM_BYTES:
            return
        self._bytes = 0
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
