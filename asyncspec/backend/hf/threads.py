"""Thread settings, to be made by a process entry before torch is imported.

Parallelism comes from the stages, one torch thread each. OpenMP's default of spinning while it
waits makes a layer 30 to 60 times slower as soon as the cores are shared.
"""

from __future__ import annotations

import os

SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    # oneDNN keeps half a MiB of code for every pair of a weight's shape and a number of rows.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
    # Rust tokenizers would otherwise start a pool of their own and warn after a fork.
    "TOKENIZERS_PARALLELISM": "false",
}


def one_quiet_thread() -> None:
    """Set the environment of this process and its children. The user's own settings win."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
