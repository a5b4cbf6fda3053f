"""A command that a signal ends: what it has started is stopped first."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def until_signal(work: Coroutine[Any, Any, int]) -> int:
    """Run ``work`` to its end, which is its exit code, or to a signal: then it is cancelled, and
    when it has stopped what it started there is a ``KeyboardInterrupt``."""
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()
    for signum in SIGNALS:
        loop.add_signal_handler(signum, interrupted.set)
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
