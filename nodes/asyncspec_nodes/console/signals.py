"""What ends a command before its work is done: termination signals, the failure of a node. It stops
what it has started."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any, TypeVar

from asyncspec.core.errors import AsyncSpecError, ClusterError

T = TypeVar("T")

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


async def until_signal(
    work: Coroutine[Any, Any, int], interrupt: Callable[[], bool] = lambda: False
) -> int:
    """Run ``work``; its result is the exit code. A termination signal cancels it, and once it has
    cleaned up ``KeyboardInterrupt`` is raised. ``interrupt`` is called at SIGINT: where it returns
    True, the work ends by itself."""
    interrupted = asyncio.Event()
    on_termination(interrupted.set)

    def on_interrupt() -> None:
        if not interrupt():
            interrupted.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, on_interrupt)
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


async def unless_failed(
    work: Coroutine[Any, Any, T], failure: Coroutine[Any, Any, AsyncSpecError]
) -> T:
    """What ``work`` returns. Raises what ``failure`` returns where that comes first, or is the
    cause of an error of ``work``."""
    working, failing = asyncio.create_task(work), asyncio.create_task(failure)
    try:
        await asyncio.wait((working, failing), return_when=asyncio.FIRST_COMPLETED)
        if working.done() and isinstance(working.exception(), ClusterError):
            # A link often breaks before the process is seen to have ended.
            await asyncio.wait((failing,), timeout=1.0)
        if failing.done() and (not working.done() or working.exception() is not None):
            raise failing.result()
        return await working
    finally:
        for task in (working, failing):
            task.cancel()
        await asyncio.gather(working, failing, return_exceptions=True)
