"""Signals that end a command: what it has started is stopped first."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What asks a process to end."""


def on_termination(action: Callable[[], None]) -> None:
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
