"""The folder of a machine that has joined: its key, logs, and the target's copy of several GiB.

It lies beside the user's caches: the temporary directory is memory on many systems. A process that
is killed leaves its folder; the next one removes it, as its lock is free then.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from asyncspec_nodes.local.file_lock import lock

PREFIX = "join-"
LOCK = "lock"


@contextmanager
def machine_folder() -> Iterator[Path]:
    """Inside, a folder that only its user can read; in the temporary directory where none can be
    made beside the caches."""
    with ExitStack() as stack:
        try:
            folder = _made(_cache_folder(), stack)
        except (OSError, RuntimeError):  # there is no home, or it cannot be written
            made = tempfile.TemporaryDirectory(prefix="asyncspec-")
            folder = Path(stack.enter_context(made))
        yield folder


def _cache_folder() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "asyncspec"


def _made(parent: Path, stack: ExitStack) -> Path:
    """One in ``parent``, locked and kept until ``stack`` ends; those that nobody holds are removed.
    Raises ``OSError``."""
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Between its making and its lock a folder looks like one that was left.
    with ExitStack() as alone:
        _lock(parent / LOCK, alone)
        for left in parent.glob(f"{PREFIX}*"):
            _remove_left(left)
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        _lock(folder / LOCK, stack)
    return folder


def _remove_left(folder: Path) -> None:
    with ExitStack() as stack:
        try:
            _lock(folder / LOCK, stack, wait=False)
        except OSError:  # it is in use
            return
        shutil.rmtree(folder, ignore_errors=True)


def _lock(file: Path, stack: ExitStack, *, wait: bool = True) -> None:
    """Until ``stack`` ends. Raises ``OSError``."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    stack.callback(os.close, descriptor)
    lock(descriptor, wait=wait)
