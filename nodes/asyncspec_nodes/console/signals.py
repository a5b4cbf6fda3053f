"""Termination signals: commands stop what they have started."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def on_termination(action: Callable[[], None]) -> None:
    """Call ``action`` in the running event loop on every termination signal."""
    loop = asyncio.get_running_loop()
    for signum in SIGNALS:
        if signum is not signal.SIGHUP:
            loop.add_signal_handler(signum, action)
        elif signal.getsignal(signum) is not signal.SIG_IGN:  # ignored under nohup
            # A closing terminal and its shell send one each: call once.
            loop.add_signal_handler(signum, cache(action))


async def until_signal(work: Coroutine[Any, Any, int]) -> int:
    """Run ``work``; its result is the exit code. A termination signal cancels it, and once it has
    cleaned up ``KeyboardInterrupt`` is raised."""
    interrupted = asyncio.Event()
    on_termination(interrupted.set)
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
