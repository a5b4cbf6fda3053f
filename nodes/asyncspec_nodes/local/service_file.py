"""This user's services in the background: a file for each, which its process keeps locked. A file
without a lock is removed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from types import TracebackType

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.errors import writing
from asyncspec.core.paths import expanded
from asyncspec_nodes.cluster.config import Config
from asyncspec_nodes.console.arguments import state_file
from asyncspec_nodes.local.file_lock import is_locked, lock

STARTING = "starting"
"""``ServiceState.pending`` of a service whose nodes have not reported yet."""


class ServiceState(Struct, frozen=True, kw_only=True):
    """A service that runs in the background."""

    pid: int
    # The package's: a service of another version is not used.
    version: str
    # When it was started, in seconds since 1970.
    started: float
    # Port of its HTTP interface.
    port: int
    # Seconds after which it has ended, once it is told to.
    stop_seconds: float = 60.0
    # What has to happen before it serves; empty: it serves.
    pending: str = STARTING
    url: str = ""
    model: str = ""
    # The cluster that it starts, once it serves with the draft node's address; None: it serves
    # another one's.
    config: Config | None = None
    # What that cluster's stages hold: "bitwise" or "tolerance".
    guarantee: str = ""
    # ``last_change`` of the target when it was loaded.
    target_changed: float = 0.0

    def age(self, now: float | None = None) -> str:
        """How long ago it was started, at the time ``now``, for people; None: at present."""
        seconds = max(0.0, (time.time() if now is None else now) - self.started)
        for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
            if seconds >= size:
                return f"{seconds // size:.0f} {unit} ago"
        return f"{seconds:.0f} s ago"


class _Header(Struct, frozen=True, kw_only=True):
    """What of a service of another version is read: enough to name it and to end it."""

    pid: int
    version: str
    started: float
    port: int
    stop_seconds: float = 60.0


def program_version() -> str:
    """Version of this package."""
    return version("asyncspec")


def folder() -> Path:
    """Where the files are."""
    return state_file("services")


def log_path(port: int) -> Path:
    """The log of a service that was asked for that port; 0: any."""
    return folder() / f"service-{port or 'any'}.log"


def state_of(pid: int) -> ServiceState | None:
    """As ``read``, of a process."""
    return read(folder() / f"{pid}.json")


def last_change(target: str) -> float:
    """When a target's files were last changed, in seconds since 1970; 0 where it is no path."""
    for name in (target, target.partition(":")[2]):
        path = expanded(name)
        with suppress(OSError):
            if name and path.exists():
                files = [path, *(path.iterdir() if path.is_dir() else ())]
                return max(float(file.stat().st_mtime) for file in files)
    return 0.0


class ServiceFile:
    """The file of this process, a service in the background: inside of ``with`` others see it."""

    def __init__(self, port: int, stop_seconds: float, config: Config | None = None) -> None:
        """``config``: of the cluster that it is about to start."""
        self._state = ServiceState(
            pid=os.getpid(),
            version=program_version(),
            started=time.time(),
            port=port,
            stop_seconds=stop_seconds,
            config=config,
        )
        self._path = folder() / f"{os.getpid()}.json"
        self._descriptor = -1

    def __enter__(self) -> ServiceFile:
        """Raises ``UserError`` where the file cannot be made."""
        with writing(str(self._path)):
            make_folder()
            # Locked under another name: a file without a lock is removed.
            hidden = self._path.with_suffix(".new")
            self._descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            lock(self._descriptor)
            self._write()
            os.replace(hidden, self._path)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def loads(self, pending: str) -> None:
        """The service waits for that."""
        self._change(replace(self._state, pending=pending or STARTING))

    def serves(self, url: str, model: str, config: Config | None, guarantee: str) -> None:
        """The service serves, on the cluster that it has started, if any, with the ``guarantee`` of
        its stages."""
        changed = 0.0 if config is None else last_change(config.target.path)
        self._change(
            replace(
                self._state,
                pending="",
                url=url,
                model=model,
                config=config,
                guarantee=guarantee,
                target_changed=changed,
            )
        )

    def _change(self, state: ServiceState) -> None:
        if state != self._state:
            self._state = state
            with suppress(OSError):  # a full disk does not end a service
                self._write()

    def _write(self) -> None:
        """In place, as the lock is the file's; a reader may meet a part of it."""
        data = msgspec.json.encode(self._state)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, data, 0)


def make_folder() -> Path:
    """The folder of the files, which others may not look into. Raises ``OSError``."""
    path = folder()
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)
    return path


def running() -> list[ServiceState]:
    """The services that run, the last one to start first. Files of others are removed."""
    states: list[ServiceState] = []
    with suppress(OSError):  # there is no folder, or none of this user's
        for path in folder().glob("*.json"):
            state = read(path)
            if state is not None:
                states.append(state)
    return sorted(states, key=lambda state: state.started, reverse=True)


def read(path: Path) -> ServiceState | None:
    """The state of a service that runs; None where it does not, or is just changing its file."""
    with suppress(OSError), _opened(path) as descriptor:
        if is_locked(descriptor):
            return _decode(os.pread(descriptor, 1 << 20, 0))
        path.unlink(missing_ok=True)
    return None


def is_running(state: ServiceState) -> bool:
    """Whether the service has not ended."""
    with suppress(OSError), _opened(folder() / f"{state.pid}.json") as descriptor:
        return is_locked(descriptor)
    return False


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _decode(data: bytes) -> ServiceState | None:
    try:
        header = msgspec.json.decode(data, type=_Header)
        if header.version == program_version():
            return msgspec.json.decode(data, type=ServiceState)
    except msgspec.MsgspecError:
        return None
    return msgspec.convert(header, ServiceState, from_attributes=True)
