"""Cores and memory that this process's control groups leave it (Linux, versions 1 and 2).

In a container, or a systemd unit with limits, /proc tells what the whole machine has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")

_MEMORY_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.high", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Of versions 2 and 1: the limit (above ``memory.high`` processes are slowed down), what is in use,
and how the lines of ``memory.stat`` for the group with those in it begin."""

_UNBOUNDED = 1 << 60
"""Version 1 writes a larger number for no limit. Not to read on: ``memory.stat`` takes the kernel
a millisecond."""


def cpu_quotas(own: Path = _OWN_GROUPS, root: Path = _GROUPS) -> Iterator[float]:
    """Cores that each of the groups leaves this process."""
    for group in _groups("cpu", own, root):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            # Of another version, or "max": no bound.
            with suppress(OSError, ValueError):
                quota, period = " ".join((group / name).read_text() for name in names).split()
                if int(quota) > 0:
                    yield int(quota) / int(period)


def memory_bounds(own: Path = _OWN_GROUPS, root: Path = _GROUPS) -> Iterator[tuple[int, int]]:
    """Bytes that each of the groups may have, and that it has left."""
    for group in _groups("memory", own, root):
        for limit_file, used_file, total in _MEMORY_FILES:
            with suppress(OSError, ValueError):
                if (limit := int((group / limit_file).read_text())) > _UNBOUNDED:
                    continue
                used = int((group / used_file).read_text())
                lines = (group / "memory.stat").read_text().splitlines()
                counts = dict(line.split() for line in lines)
                inactive, active = (
                    int(counts.get(f"{total}{name}", 0))
                    for name in ("inactive_file", "active_file")
                )
                # The kernel gives up cached files, those that were read once first. Others may be
                # in use: as in /proc/meminfo's MemAvailable, half of them stay.
                yield limit, max(0, limit - used + inactive + active // 2)


def total_memory() -> int:
    """Bytes of memory that this process may have at most."""
    total: int = psutil.virtual_memory().total
    return min([total, *(limit for limit, _ in memory_bounds())])


def available_memory() -> int:
    """Bytes of memory that are free to this process, or can be freed at once."""
    available: int = psutil.virtual_memory().available
    return min([available, *(left for _, left in memory_bounds())])


def _groups(controller: str, own: Path, root: Path) -> Iterator[Path]:
    """Folders of this process's groups, and of those around them. Inside a container the path may
    be one of the host; its own group is then the root."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mounted = root
        if controllers:
            mounted /= controller if (root / controller).exists() else controllers
        group = mounted / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(mounted):
                yield folder
