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
    here = config.at(rank).host
    stages = sum(node.host == here for node in config.node if node.rank)
    available: int = psutil.virtual_memory().available
    return available // 2 // stages
