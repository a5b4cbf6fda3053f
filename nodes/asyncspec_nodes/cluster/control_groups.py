"""Cores and memory that this process's control groups leave it (Linux, versions 1 and 2).

In a container, or a systemd unit with limits, /proc tells what the whole machine has.
"""

from __future__ import annotations

import math
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
"""Versions 2 and 1: the limit (above ``memory.high`` processes are slowed down), what is in use,
and how the lines of ``memory.stat`` for the group with those in it begin."""

_KILL_FILES = ("memory.events", "memory.oom_control")
"""Versions 2 and 1: a line of them counts the processes that the kernel has ended for want of
memory."""

_LOOK_SECONDS = 1.0

_MACHINE = Path("/proc/vmstat")
"""It counts those of the whole machine."""

_UNBOUNDED = 1 << 60
"""Version 1 writes a larger number for no limit. Not to read on: ``memory.stat`` takes the kernel
a millisecond."""


def cpu_quotas(groups_file: Path = _OWN_GROUPS, root: Path = _GROUPS) -> Iterator[float]:
    """Cores that each of the groups leaves this process."""
    for group in _groups("cpu", groups_file, root):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            # No bound in files of another version, nor by "max".
            with suppress(OSError, ValueError):
                quota, period = " ".join((group / name).read_text() for name in names).split()
                if int(quota) > 0:
                    yield int(quota) / int(period)


def memory_bounds(
    groups_file: Path = _OWN_GROUPS, root: Path = _GROUPS
) -> Iterator[tuple[int, int]]:
    """Bytes that each of the groups may have, and that it has left."""
    for group in _groups("memory", groups_file, root):
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


class MemoryKills:
    """Whether the kernel has ended a process for want of memory: by the count of its group, or of
    the machine where groups count nothing. Others of the same group count as well, so ``look`` is
    to be called every few seconds: what the last two have seen is compared with the end."""

    def __init__(self, root: Path = _GROUPS, machine: Path = _MACHINE) -> None:
        self._root = root
        self._machine = machine
        # What counts, and the count at the last look and at the one before.
        self._file: Path | None = None
        self._counts = (0, 0)
        self._looked_at = -math.inf

    def look(self, process: Path, now: float) -> None:
        """Note the count while the process lives, or has ended since the last look.
        ``process``: its ``/proc/PID/cgroup``."""
        groups = _groups("memory", process, self._root)
        files = [group / name for group in groups for name in _KILL_FILES]
        for file in (*files, self._machine):
            if (count := _kills(file)) is not None:
                same = file == self._file
                if same and now - self._looked_at < _LOOK_SECONDS:
                    return  # it may have ended a moment ago, as what it has written is read later
                outer = () if self._file is None or same else (*self._file.parents, self._machine)
                if file.parent in outer or file in outer:
                    return  # a process that has ended is in a group above, or in none
                self._looked_at = now
                self._file, self._counts = file, (self._counts[1] if same else count, count)
                return

    @property
    def risen(self) -> bool:
        """Whether there has been one since the last look but one; False where nothing counts."""
        return self._file is not None and (_kills(self._file) or 0) > self._counts[0]


def _kills(file: Path) -> int | None:
    with suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None


def _groups(controller: str, groups_file: Path, root: Path) -> Iterator[Path]:
    """Folders of this process's groups, and of those around them. Inside a container the path may
    be one of the host; its own group is then the root."""
    try:
        lines = groups_file.read_text().splitlines()
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
