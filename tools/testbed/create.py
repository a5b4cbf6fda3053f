"""Making a bed's namespaces and cgroups, or finding out why they are not to be had."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from asyncspec.core.errors import ClusterError, UserError
from tools.testbed import cgroups, host, plan, state
from tools.testbed.cgroups import Cgroups, Group
from tools.testbed.plan import Names
from tools.testbed.remove import remove, sweep
from tools.testbed.state import State
from tools.testbed.tables import Description, DeviceTable
from tools.testbed.wires import lines

Network = Literal["auto", "namespaces", "loopback"]


def create(description: Description, network: Network, notes: list[str]) -> State:
    """Make what the kernel has to hold of a bed; the caller removes it. What does not hold here
    is appended to ``notes``. Raises ``ClusterError``, and ``UserError`` where namespaces were asked
    for and are not to be had."""
    if network == "loopback":
        return _stand(description, notes, namespaces=False)
    problem = host.lacking()
    if problem is None:
        try:
            return _stand(description, notes, namespaces=True)
        except ClusterError as error:
            problem = str(error)
    if network == "namespaces":
        raise UserError(f"no namespaces here: {problem}")
    notes.append(f"no namespaces here: {problem}; all devices are on loopback")
    return _stand(description, notes, namespaces=False)


def _stand(description: Description, notes: list[str], *, namespaces: bool) -> State:
    standing, groups, found = _register(description, namespaces=namespaces)
    try:
        _make(Path(standing.scratch))
        if standing.slot is not None:
            names = Names(standing.id, standing.devices, standing.slot)
            for command in plan.up(names, lines(description)):
                host.execute(command)
        limited = _limit(found, groups, notes)
    except BaseException:
        remove(standing)
        raise
    if not limited:
        cgroups.remove(Path(folder) for folder in standing.folders)
        prefixes = (_prefix(standing, n, Group((), ())) for n in range(standing.devices))
        standing = replace(standing, folders=(), prefixes=tuple(prefixes))
        state.write(standing)
    notes += _unlimited(description, found if limited else None)
    return standing


def _register(
    description: Description, *, namespaces: bool
) -> tuple[State, list[Group], Cgroups | None]:
    """Choose names and write them down, before anything is made."""
    found = cgroups.detect(Path("/proc/mounts").read_text())
    started = state.start_time(os.getpid())
    assert started is not None  # we run
    with state.locked():
        sweep()
        name, slot = state.free_name(state.known())
        groups = [_group(found, f"{name}-{n}", d) for n, d in enumerate(description.device)]
        standing = State(
            id=name,
            pid=os.getpid(),
            started=started,
            devices=len(groups),
            slot=slot if namespaces else None,
            folders=tuple(str(folder) for group in groups for folder in group.folders),
            prefixes=(),
            scratch=state.scratch(name),
        )
        prefixes = (_prefix(standing, n, group) for n, group in enumerate(groups))
        standing = replace(standing, prefixes=tuple(prefixes))
        state.write(standing)
    return standing, groups, found


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise ClusterError(f"cannot make {folder}: {error.strerror}") from None


def _group(found: Cgroups | None, name: str, device: DeviceTable) -> Group:
    if found is None:
        return Group((), ())
    return cgroups.group(found, name, device.cpu, device.memory_mib)


def _limit(found: Cgroups | None, groups: list[Group], notes: list[str]) -> bool:
    try:
        for group in groups:
            if found is not None:
                cgroups.create(found, group)
    except ClusterError as error:
        notes.append(str(error))
        return False
    return True


def _unlimited(description: Description, found: Cgroups | None) -> list[str]:
    """A sentence for every limit that is not kept."""
    text = "device {}: {} has no effect, as there is no cgroup controller for it; give a pace"
    have_cpu = found is not None and found.cpu is not None
    have_memory = found is not None and found.memory is not None
    notes = []
    for number, device in enumerate(description.device):
        if device.cpu is not None and not have_cpu:
            notes.append(text.format(number, "cpu"))
        if device.memory_mib is not None and not have_memory:
            notes.append(text.format(number, "memory_mib").removesuffix("; give a pace"))
    return notes


def _prefix(standing: State, number: int, group: Group) -> tuple[str, ...]:
    """What stands before a command on a device: it joins the cgroup, enters the namespace, and
    becomes the command, so its process number stays."""
    prefix: tuple[str, ...] = ()
    if group.entrances:
        files = " ".join(shlex.quote(str(file)) for file in group.entrances)
        script = f'for file in {files}; do echo $$ >"$file" || exit 125; done; exec "$@"'
        prefix = ("/bin/sh", "-c", script, "sh")
    if standing.slot is not None:
        names = Names(standing.id, standing.devices, standing.slot)
        prefix += plan.inside(names.device(number))
    return prefix
