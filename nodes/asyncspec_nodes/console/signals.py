"""Ctrl-C before there is anything to stop.

Law of this file: it imports next to nothing, as nothing is imported before it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

LAST_WORDS = "asyncspec: interrupted\n"


@contextmanager
def ends_at_once(last_words: str = LAST_WORDS, code: int = 1) -> Iterator[None]:
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


# --- A command that a signal ends: what it has started is stopped first.

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What asks a process to end."""


def when_told_to_end(action: Callable[[], None]) -> None:
    """Have the running event loop call ``action`` on every signal that asks this process to end."""
    loop = asyncio.get_running_loop()
    for signum in SIGNALS:
        if signum is not signal.SIGHUP:
            loop.add_signal_handler(signum, action)
        elif signal.getsignal(signum) is not signal.SIG_IGN:  # by nohup, to outlive its terminal
            # A terminal that closes sends one, and its shell another: they are one request.
            loop.add_signal_handler(signum, cache(action))


async def until_signal(work: Coroutine[Any, Any, int]) -> int:
    """Run ``work`` to its end, which is its exit code, or to a signal: then it is cancelled, and
    when it has stopped what it started there is a ``KeyboardInterrupt``."""
    interrupted = asyncio.Event()
    when_told_to_end(interrupted.set)
    working = asyncio.create_task(work)
    waiting = asyncio.create_task(interrupted.wait())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        working.cancel()
        await asyncio.wait((working,))
        raise KeyboardInterrupt
    finally:
        waiting.cancel()
