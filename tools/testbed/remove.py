"""Removing a bed: what runs in it, its namespaces and interfaces, its cgroups, its files.

Every step finds the work of the steps before it done or not begun, so this may be repeated, and
begun by a process that knows nothing but the file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

from asyncspec.core.errors import ClusterError, UserError
from tools.testbed import cgroups, plan, state
from tools.testbed.host import execute
from tools.testbed.plan import Names
from tools.testbed.state import State

KILL_SECONDS = 5.0
ASK_SECONDS = 10.0


def remove(bed: State) -> None:
    """Nothing is left of the bed. Raises ``ClusterError`` for what cannot be removed, ``UserError``
    where its folder has not the name of a bed's."""
    # Another TMPDIR may have been set where the bed was made.
    if bed.scratch and Path(bed.scratch).name != Path(state.scratch(bed.id)).name:
        raise UserError(f"bed {bed.id} names {bed.scratch} as its folder, which is no bed's")
    names = None if bed.slot is None else Names(bed.id, bed.devices, bed.slot)
    folders = [Path(folder) for folder in bed.folders]
    _kill(names, folders)
    if names is not None:
        for command in plan.down(names):
            _attempt(command)
        left = [space for space in names.namespaces if _exists(space)]
        if left:
            raise ClusterError(f"cannot remove the namespaces {', '.join(left)}")
    cgroups.remove(folders)
    if bed.scratch:
        _remove_folder(Path(bed.scratch))
    state.forget(bed)


def sweep() -> list[str]:
    """Remove the beds whose owners are gone: their ids. The caller holds the lock."""
    stale = [bed for bed in state.known() if not state.alive(bed)]
    for bed in stale:
        remove(bed)
    return [bed.id for bed in stale]


def ask_owner(bed: State) -> None:
    """Have the owner take its bed down; if it does not, end it. Who merely has its number by now is
    left alone."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        if not state.alive(bed):
            return
        end = time.monotonic() + ASK_SECONDS
        with contextlib.suppress(ProcessLookupError):
            os.kill(bed.pid, signum)
        while state.alive(bed) and time.monotonic() < end:
            time.sleep(0.02)


def _kill(names: Names | None, folders: list[Path]) -> None:
    end = time.monotonic() + KILL_SECONDS
    while pids := _inside(names, folders):
        if time.monotonic() >= end:
            raise ClusterError(f"cannot end the processes {sorted(pids)} of a bed")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _inside(names: Names | None, folders: list[Path]) -> set[int]:
    pids = cgroups.members(folders)
    for space in names.namespaces if names is not None else ():
        with contextlib.suppress(ClusterError):
            pids |= {int(pid) for pid in execute(("ip", "netns", "pids", space)).split()}
    return pids - {os.getpid()}


def _remove_folder(folder: Path) -> None:
    # Somebody else may be removing it as well.
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        raise ClusterError(f"cannot remove {folder}")


def _attempt(command: plan.Command) -> None:
    # It was never made, or went before.
    with contextlib.suppress(ClusterError):
        execute(command)


def _exists(space: str) -> bool:
    return Path("/run/netns", space).exists()
