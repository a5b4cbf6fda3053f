"""Locks of open files: the system releases one with its process, however that ends, so that a lock
tells whether what a file stands for is still in use, and no process id is mistaken for a later one.

The only module that imports ``fcntl``, which Windows lacks.
"""

from __future__ import annotations

import fcntl


def lock(descriptor: int, *, wait: bool = False) -> None:
    """Until the descriptor is closed. Raises ``BlockingIOError`` where another one has the file
    locked and this is not to ``wait``, and ``OSError`` where its file system has no locks."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def is_locked(descriptor: int) -> bool:
    """Whether another descriptor has the file locked. Raises ``OSError`` as ``lock``."""
    try:
        # Shared, so that two that look do not take each other for the holder.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False
