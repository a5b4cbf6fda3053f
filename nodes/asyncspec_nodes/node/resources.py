"""How much memory this process has."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from asyncspec.backend.threads import COUNT_VARIABLES, set_thread_count, set_thread_defaults
from asyncspec_nodes.cluster.config import Config

MIB = 1 << 20
_STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Resident memory now; where the system does not say, the most there ever was."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def cache_budget(config: Config, rank: int) -> int:
    """Bytes that the caches of a stage may take, asked once its weights are loaded."""
    if config.limits.cache_mib:
        return config.limits.cache_mib * MIB
    available: int = psutil.virtual_memory().available
    return available // 2 // _stages_here(config, rank)


def draft_budget(config: Config, rank: int) -> int:
    """Bytes that a token source may hold of its sessions, asked once it is loaded. Beside stages it
    takes as much as one of them."""
    if config.limits.draft_mib:
        return config.limits.draft_mib * MIB
    available: int = psutil.virtual_memory().available
    return available // 2 // (1 + _stages_here(config, rank))


def _stages_here(config: Config, rank: int) -> int:
    """Stages on the machine of a node; none are known of beside one that is in no file."""
    node = config.find(rank)
    return sum(node is not None and other.host == node.host for other in config.node if other.rank)


# --- Threads

_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def set_threads(config: Config, rank: int, host: str, asked: int | None = None) -> None:
    """Before torch is imported: ``asked`` threads, else as many as the environment says, else the
    share of a node that listens at ``host``."""
    if asked is None and not any(name in os.environ for name in COUNT_VARIABLES):
        asked = thread_share(config, rank, host)
    if asked is None:
        set_thread_defaults()
    else:
        set_thread_count(asked)


def set_local_threads(config: Config) -> None:
    """The same for a process that is no node, or not yet: as many as each node of a cluster that
    ``asyncspec run`` or ``serve`` starts has. All of them share this machine."""
    node = config.nodes[0]
    set_threads(config, node.rank, node.host)


def thread_share(config: Config, rank: int, host: str) -> int:
    """Threads for a node that listens at ``host``: its part of what this machine's nodes have, as
    far as the cluster file knows them; at least one."""
    others = sum(node.host == host and node.rank != rank for node in config.nodes)
    return max(1, cores() // (1 + others))


def cores() -> int:
    """Whole cores that this process may use. Threads of one core have one unit for products, so
    they count once."""
    threads = psutil.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else threads
    whole = allowed * (psutil.cpu_count(logical=False) or threads) / threads
    return max(1, round(min([whole, *cpu_quotas()])))


def cpu_quotas(own: Path = _OWN_GROUPS, root: Path = _GROUPS) -> Iterator[float]:
    """Cores that control groups leave this process: of each of them, version 1 or 2, that bounds
    its processor. Inside a container the path may be one of outside; its own group is the root
    there."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if names == [""]:
            mounted = root
        elif "cpu" in names:
            mounted = root / ("cpu" if (root / "cpu").exists() else controllers)
        else:
            continue
        group = mounted / path.lstrip("/")
        inside = (x for x in (group, *group.parents) if x.is_relative_to(mounted))
        yield from (quota for folder in inside for quota in _quota(folder))


def _quota(group: Path) -> Iterator[float]:
    """Of one group, where it has one."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = (
                (group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            )
    except (OSError, ValueError):
        return
    if quota != "max" and int(quota) > 0:
        yield int(quota) / int(period)
