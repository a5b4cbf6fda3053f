"""How much memory this process has."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import psutil

from asyncspec_nodes.cluster.config_tables import Config

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
