"""A node's deadlines on the event loop's clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from asyncspec.actor.machine import Fired


class Timers:
    """Deadlines by name; one that comes is fed to the machine. Needs a running event loop."""

    def __init__(self, feed: Callable[[Fired], None]) -> None:
        self._feed = feed
        self._loop = asyncio.get_running_loop()
        self._handles: dict[str, asyncio.TimerHandle] = {}

    def arm(self, timer: str, at: float | None) -> None:
        """``Fired(timer)`` is due at ``at`` (seconds of ``time.monotonic``) and no longer when it
        was before; None: not at all."""
        if (old := self._handles.pop(timer, None)) is not None:
            old.cancel()
        if at is not None:
            # A machine's clock is finer than some event loops' own.
            delay = max(0.0, at - time.monotonic())
            self._handles[timer] = self._loop.call_later(delay, self._fire, timer)

    def close(self) -> None:
        """None of them comes any more."""
        for handle in self._handles.values():
            handle.cancel()

    def _fire(self, timer: str) -> None:
        del self._handles[timer]
        self._feed(Fired(timer))
