"""Processor and memory limits by cgroups, version 1 or 2, whichever is mounted.

What to write where is data (``Group``), so it is the same for a real tree and for one of plain
files.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from asyncspec.core.errors import ClusterError

PERIOD_MICROSECONDS = 10_000
"""A quota is used up and renewed this often: short against what a user notices, long enough that
the kernel hands out no slices of nothing."""

MIN_QUOTA_MICROSECONDS = 1_000
"""The kernel's own bound."""

MEBIBYTE = 1 << 20
REMOVE_SECONDS = 2.0


class Cgroups(Struct, frozen=True):
    """Where groups are made. ``cpu`` and ``memory`` are the same folder in version 2; None: that
    controller is not to be had."""

    version: int
    cpu: Path | None
    memory: Path | None


class Group(Struct, frozen=True):
    """One device's group, as data."""

    folders: tuple[Path, ...]
    # Files and what is written to them, in order.
    writes: tuple[tuple[Path, str], ...]

    @property
    def entrances(self) -> tuple[Path, ...]:
        """A process joins by writing its number to each of them."""
        return tuple(folder / "cgroup.procs" for folder in self.folders)


def detect(mounts: str) -> Cgroups | None:
    """From the text of /proc/mounts: version 2 where it has the processor, else version 1."""
    found: dict[str, Path] = {}
    for line in mounts.splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup2":
            controllers = _read(Path(where) / "cgroup.controllers").split()
            if "cpu" in controllers:
                root = Path(where)
                return Cgroups(2, root, root if "memory" in controllers else None)
        elif kind == "cgroup":
            for name in {"cpu", "memory"} & set(options.split(",")):
                found[name] = Path(where)
    return Cgroups(1, found.get("cpu"), found.get("memory")) if found else None


def group(cgroups: Cgroups, name: str, cores: float | None, memory_mib: int | None) -> Group:
    """The group of a device with these limits; controllers that are missing are left out."""
    folders: list[Path] = []
    writes: list[tuple[Path, str]] = []
    if cores is not None and cgroups.cpu is not None:
        folder = cgroups.cpu / name
        folders.append(folder)
        period = max(PERIOD_MICROSECONDS, math.ceil(MIN_QUOTA_MICROSECONDS / cores))
        quota = round(cores * period)
        if cgroups.version == 2:
            writes.append((folder / "cpu.max", f"{quota} {period}"))
        else:
            writes.append((folder / "cpu.cfs_period_us", str(period)))
            writes.append((folder / "cpu.cfs_quota_us", str(quota)))
    if memory_mib is not None and cgroups.memory is not None:
        folder = cgroups.memory / name
        if folder not in folders:
            folders.append(folder)
        file = "memory.max" if cgroups.version == 2 else "memory.limit_in_bytes"
        writes.append((folder / file, str(memory_mib * MEBIBYTE)))
    return Group(tuple(folders), tuple(writes))


def create(cgroups: Cgroups, wanted: Group) -> None:
    """Make the group and set its limits. Raises ``ClusterError``."""
    try:
        if cgroups.version == 2 and wanted.folders and cgroups.cpu is not None:
            _enable(cgroups.cpu, ["cpu"] if cgroups.memory is None else ["cpu", "memory"])
        for folder in wanted.folders:
            folder.mkdir(exist_ok=True)
        for file, value in wanted.writes:
            file.write_text(value)
    except OSError as error:
        raise ClusterError(f"cannot set up the cgroup {error.filename}: {error.strerror}") from None


def _enable(root: Path, controllers: Iterable[str]) -> None:
    """A version 2 folder passes controllers on only where told to."""
    control = root / "cgroup.subtree_control"
    passed = _read(control).split()
    lacking = [name for name in controllers if name not in passed]
    if lacking:
        control.write_text(" ".join(f"+{name}" for name in lacking))


def members(folders: Iterable[Path]) -> set[int]:
    """The processes in these groups."""
    return {int(pid) for folder in folders for pid in _read(folder / "cgroup.procs").split()}


def remove(folders: Iterable[Path]) -> None:
    """Remove groups without members; one that is gone already is fine. Raises ``ClusterError``."""
    for folder in folders:
        end = time.monotonic() + REMOVE_SECONDS
        while True:
            try:
                folder.rmdir()
            except FileNotFoundError:
                break
            except OSError as error:
                # Who was killed a moment ago is still a member for a moment.
                if time.monotonic() >= end:
                    text = f"cannot remove the cgroup {folder}: {error.strerror}"
                    raise ClusterError(text) from None
                time.sleep(0.01)
            else:
                break


def _read(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text()
    return ""
