"""SIGINT while a command is still importing its modules.

Imports only the standard library's lightest modules: nothing is imported before this one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED = "asyncspec: interrupted\n"

END_OF_PROGRESS = "\r\x1b[K\x1b[?25h"
"""For a terminal where a line shows progress: clears it, and shows the cursor."""


@contextmanager
def exit_on_interrupt(last_words: str = INTERRUPTED, code: int = 1) -> Iterator[None]:
    """Inside, SIGINT ends this process with ``last_words`` on stderr. For imports, where a
    ``KeyboardInterrupt`` may be lost: torch's C code drops some, and one raised through ``exec()``
    changes the exit code. No effect in other threads or where SIGINT has a handler."""

    def end(signum: int, frame: FrameType | None) -> None:
        if last_words and os.isatty(2) and os.environ.get("TERM") != "dumb":
            os.write(2, END_OF_PROGRESS.encode())
        os.write(2, last_words.encode())
        os._exit(code)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is end:
            signal.signal(signal.SIGINT, signal.default_int_handler)
