"""Thread settings, to be made by a process entry before torch is imported.

On one machine parallelism comes from the stages, one torch thread each; a node with cores of its
own has a thread for each. OpenMP's default of spinning while it waits makes a layer 30 to 60 times
slower as soon as the cores are shared.
"""

from __future__ import annotations

import os

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
