"""Thread settings, to be made by a process entry before torch is imported.

On one machine parallelism comes from the stages, one torch thread each; a node with cores of its
own has a thread for each. OpenMP's default of spinning while it waits makes a layer 30 to 60 times
slower as soon as the cores are shared.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

COUNT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

SETTINGS = {
    **dict.fromkeys(COUNT, "1"),
    "OMP_WAIT_POLICY": "passive",
    # oneDNN keeps half a MiB of code for every pair of a weight's shape and a number of rows.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
    # Rust tokenizers would otherwise start a pool of their own and warn after a fork.
    "TOKENIZERS_PARALLELISM": "false",
}

_SPINS = 10_000
"""Rounds of some nanoseconds that several threads wait awake for each other's next product: less
than it takes to wake up, so it costs little where a core is shared after all."""


def quiet_threads(count: int) -> None:
    """So many threads share this process's products, whatever its environment says of it."""
    os.environ.update(dict.fromkeys(COUNT, str(count)))
    one_quiet_thread()


def one_quiet_thread() -> None:
    """Set the environment of this process and its children. The user's own settings win."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    alone = os.environ[COUNT[0]] == "1"
    os.environ.setdefault("GOMP_SPINCOUNT", "0" if alone else str(_SPINS))


def threads() -> int:
    """How many share a product of this process; torch must have been imported before, or is now."""
    import torch

    return torch.get_num_threads()


# --- Keeps transformers from talking to a user's terminal.


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and load reports on a user's terminal; the settings before come back."""
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


# --- Freed memory, given back to the operating system.

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
