"""Which beds there are: a file for each, written before anything of it is made.

So whatever happens to the process that owns a bed, the next one that looks finds what it has to
remove. A bed is stale when its owner is gone; a process is known by its number and start time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from asyncspec.core.errors import ClusterError, UserError
from tools.testbed.plan import SLOTS

ID_LETTERS = "asb"


class State(Struct, frozen=True):
    """One bed, as far as others must know it."""

    id: str
    # The owner.
    pid: int
    started: int
    devices: int
    # Number of its network; None: it has no namespaces.
    slot: int | None
    # Folders of its cgroups.
    folders: tuple[str, ...]
    # What stands before a command that is to run on a device.
    prefixes: tuple[tuple[str, ...], ...]
    # Where its clusters put their files; empty: an older bed, which has none.
    scratch: str = ""


def directory() -> Path:
    """Where the files lie; it is there afterwards. Raises ``UserError``."""
    root = os.geteuid() == 0
    return private(Path("/run/asyncspec-testbed") if root else _personal())


def private(path: Path) -> Path:
    """A folder, made where it is not there, that nobody else may write to: its files say what is
    removed and run. Raises ``UserError``: anybody may have made one of this name before."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    found = path.lstat()
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not ours or found.st_mode & 0o077:
        raise UserError(
            f"{path} is not a folder of yours alone (mode 0700); remove it, or set TMPDIR"
        )
    return path


def _personal() -> Path:
    return Path(tempfile.gettempdir()) / f"asyncspec-testbed-{os.geteuid()}"


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Only one process at a time chooses names or ports, or removes stale beds."""
    with (directory() / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def known() -> list[State]:
    """All beds, stale ones too. Raises ``UserError``."""
    found = []
    for path in sorted(directory().glob(f"{ID_LETTERS}*.json")):
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            found.append(msgspec.json.decode(path.read_bytes(), type=State))
    return found


def free_name(states: list[State]) -> tuple[str, int]:
    """An id and a network that no bed has. Raises ``ClusterError``."""
    slots = {state.slot for state in states}
    slot = next((slot for slot in range(SLOTS) if slot not in slots), None)
    if slot is None:
        raise ClusterError(f"there are {SLOTS} beds already; take some down")
    return f"{ID_LETTERS}{secrets.token_hex(3)}", slot


def scratch(name: str) -> str:
    """A folder of a bed's own, which is nobody's yet."""
    return str(Path(tempfile.gettempdir()) / f"asyncspec-testbed-{name}")


def write(state: State) -> None:
    """Others can see the bed, or its news, from now on; never half of it."""
    path = _path(state)
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(state))
    part.replace(path)


def forget(state: State) -> None:
    """The bed is gone."""
    _path(state).unlink(missing_ok=True)


def alive(state: State) -> bool:
    """Whether the bed's owner still runs."""
    return start_time(state.pid) == state.started


def start_time(pid: int) -> int | None:
    """When a process was started, in the kernel's ticks; None: there is none, or its corpse."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in parentheses, may contain anything.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _path(state: State) -> Path:
    return directory() / f"{state.id}.json"
