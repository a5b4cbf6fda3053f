"""Thread settings of native libraries, made in the environment before a backend is imported.

Stages of one machine have one thread each, a node with cores of its own one for each. OpenMP's
default of spinning while it waits makes a layer 30 to 60 times slower where cores are shared.
"""

from __future__ import annotations

import os

COUNT_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

DEFAULTS = {
    **dict.fromkeys(COUNT_VARIABLES, "1"),
    "OMP_WAIT_POLICY": "passive",
    # oneDNN keeps half a MiB of code for every pair of a weight's shape and a number of rows.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
    # Rust tokenizers would otherwise start a pool of their own and warn after a fork.
    "TOKENIZERS_PARALLELISM": "false",
}

_SPIN_COUNT = 10_000
"""Iterations of some nanoseconds for which several threads spin before they sleep: less than a
wake-up takes, so it costs little where a core is shared after all."""


def set_thread_count(count: int) -> None:
    """Give this process and its children ``count`` threads, whatever the environment says."""
    os.environ.update(dict.fromkeys(COUNT_VARIABLES, str(count)))
    set_thread_defaults()


def set_thread_defaults() -> None:
    """Complete the environment of this process and its children. The user's own settings win."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    single = os.environ[COUNT_VARIABLES[0]] == "1"
    os.environ.setdefault("GOMP_SPINCOUNT", "0" if single else str(_SPIN_COUNT))
