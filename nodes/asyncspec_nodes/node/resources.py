"""Memory and threads of this process, and what a machine has for stages."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

from asyncspec.backend.base import CPU, DeviceMemory
from asyncspec.backend.threads import COUNT_VARIABLES, set_thread_count, set_thread_defaults
from asyncspec.core.errors import UserError
from asyncspec_nodes.cluster.config import Config
from asyncspec_nodes.cluster.control_groups import available_memory, cpu_quotas

MIB = 1 << 20
FILES, MIN_FILES = 8192, 256
"""Open files that a node takes at most (connections of HTTP, clients and nodes), and at least."""

MEMORY_SHARE = 0.9
"""Share of what is free: the system and other programs need some."""

_ROWS, _WIDTH = 4096, 4096
_TRIALS = 4


def resident_bytes() -> int:
    """Resident memory now."""
    resident: int = psutil.Process().memory_info().rss
    return resident


def available_bytes() -> int:
    """Memory that is free to this process, or can be freed at once."""
    return available_memory()


def freeze_objects(*, collect: bool = True) -> None:
    """Let the garbage collector visit none of today's objects again, which stay: each of its full
    passes over what is loaded would hold a node for .3 s, and a service for 30 ms. ``collect``:
    after such a pass."""
    if collect:
        gc.collect()
    gc.freeze()


def raise_file_limit() -> None:
    """Raise this process's limit of open files as far as it may. Raises ``UserError`` where that is
    too little for a node's files, peers and clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = limit
    if soft != resource.RLIM_INFINITY and soft < MIN_FILES:
        raise UserError(
            f"this process may open {soft} files, and a node needs {MIN_FILES}; raise the limit "
            "(ulimit -n, LimitNOFILE= of systemd)"
        )


def cache_budget(config: Config, rank: int, memory: DeviceMemory | None = None) -> int:
    """Bytes for a stage's caches or a token source's sessions: by the cluster file, else a share of
    half of what is free once weights are loaded, on this machine or in the ``memory`` of its
    device; a source has as much as a stage there."""
    is_stage = 1 <= rank <= config.stages
    if mib := config.limits.cache_mib if is_stage else config.limits.draft_mib:
        return mib * MIB
    # No stages are known beside a node that is in no file.
    host = getattr(config.find(rank), "host", None)
    device = config.engine_of(rank).device
    beside = [node.rank for node in config.node if node.rank and node.host == host]
    if memory is not None:
        beside = [other for other in beside if config.engine_of(other).device == device]
    free = available_bytes() if memory is None else memory.free
    return free // 2 // (len(beside) if is_stage else len(beside) + 1)


def stage_share(config: Config, rank: int) -> float:
    """The share of the stages that are on a node's machine."""
    host = getattr(config.find(rank), "host", None)
    return sum(node.host == host for node in config.node if node.rank) / max(1, config.stages)


def set_threads(config: Config, rank: int, host: str, wanted: int | None = None) -> None:
    """Before torch is imported: ``wanted``, the environment's, or the node's share of threads."""
    if wanted is None and not threads_are_set():
        wanted = thread_share(config, rank, host)
    if wanted is None:
        set_thread_defaults()
    else:
        set_thread_count(wanted)


def threads_are_set() -> bool:
    """Whether the environment says how many threads share a product."""
    return any(name in os.environ for name in COUNT_VARIABLES)


def set_local_threads(config: Config) -> None:
    """The same for a process that is no node, or not yet: as many as each node of a cluster that
    ``asyncspec run`` or ``serve`` starts has. All of them share this machine."""
    node = config.nodes[0]
    set_threads(config, node.rank, node.host)


def thread_share(config: Config, rank: int, host: str) -> int:
    """A node's threads: this machine's cores divided by its nodes that the cluster file lists."""
    others = sum(node.host == host and node.rank != rank for node in config.nodes)
    return max(1, cores() // (1 + others))


def devices_beside(
    config: Config, rank: int, source_device: str, device_of: Callable[[str], str]
) -> list[str]:
    """What the nodes of a draft node's machine compute on, itself among them with its token source.
    Emulated devices share nothing. ``device_of``: a device, by what an option calls it; one that
    this process does not see (``UserError``) keeps the option's name."""
    host = getattr(config.find(rank), "host", None)
    devices = []
    for node in config.nodes:
        if node.host != host or node.rank in config.pace:
            continue
        device = CPU
        if node.rank != rank or source_device != CPU:
            device = config.engine_of(node.rank).device
            with suppress(UserError):
                device = device_of(device)
        devices.append(device)
    return devices


def shared_processors(devices: Sequence[str], threads: int, elsewhere: int = 0) -> float:
    """Nodes of a cluster that can work at a time; 0: the draft node shares its machine with none.
    ``devices``: of that machine's nodes. As many work on its CPU as have ``threads`` each, one on
    each GPU, where processes take turns, and all ``elsewhere``."""
    if len(devices) < 2:
        return 0.0
    here = cores() / threads
    if gpus := {*devices} - {CPU}:
        here = len(gpus) + min(here, devices.count(CPU))
    return here + elsewhere


def cores() -> int:
    """Whole cores of this process: threads of one core share one unit for products."""
    threads = psutil.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else threads
    whole = allowed * (psutil.cpu_count(logical=False) or threads) / threads
    return max(1, round(min([whole, *cpu_quotas()])))


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
