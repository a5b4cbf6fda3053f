"""SIGINT while a command is still importing its modules.

Imports only the standard library's lightest modules: nothing is imported before this one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = "asyncspec: interrupted\n"


@contextmanager
def exit_on_interrupt(last_words: str = INTERRUPTED, code: int = 1) -> Iterator[None]:
    """While modules are imported inside, SIGINT ends this process with ``last_words`` on stderr. An
    exception in the middle of an import need not arrive: torch's C code drops some, and one that
    has passed an ``exec()`` changes the exit code. Where somebody else sees to the signal, or in a
    thread, which gets none, nothing changes."""

    def end(signum: int, frame: FrameType | None) -> None:
        os.write(2, last_words.encode())
        os._exit(code)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or not _heeded(end):
        yield
        return
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is end:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _heeded(handler: Callable[[int, FrameType | None], None]) -> bool:
    try:
        signal.signal(signal.SIGINT, handler)
    except ValueError:  # not the main thread
        return False
    return True
