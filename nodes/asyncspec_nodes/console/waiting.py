"""What a command waits for, and for how long, on a terminal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

SHOWN_AFTER = 2.0
"""Seconds of a wait that need not be shown."""

LOOK_SECONDS = 0.25
"""Between looks at what a program waits for."""


class Waiting:
    """Inside of ``with``: after ``SHOWN_AFTER`` seconds a line on stderr with ``what`` is waited
    for and its seconds, which goes at the end, or with ``stop``; nothing where stderr is no
    terminal."""

    def __init__(
        self, what: str, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what = what
        self._detail = ""
        self._clock = clock
        self._begun = clock()
        # Without line breaks in what others write above it, as a token is copied.
        self._console = console or Console(stderr=True, soft_wrap=True)
        self._live: Live | None = None

    def __enter__(self) -> Waiting:
        self._begun = self._clock()
        if self._console.is_terminal:
            self._live = Live(get_renderable=self.line, console=self._console, transient=True)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Nothing is waited for any more."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, detail: str) -> None:
        """The step that it waits for now."""
        self._detail = detail

    def line(self) -> RenderableType:
        """What is shown."""
        seconds = self._clock() - self._begun
        if seconds < SHOWN_AFTER:
            return Group()
        detail = f": {self._detail}" if self._detail else ""
        return Text(f"{self._what}, {seconds:.0f} s{detail}")


async def show_waits(what: str, pending: Callable[[], str]) -> None:
    """Until cancelled: while ``pending`` says something, the wait for it, as ``Waiting``."""
    while True:
        if pending():
            with Waiting(what) as waiting:
                while detail := pending():
                    waiting.say(detail)
                    await asyncio.sleep(LOOK_SECONDS)
        await asyncio.sleep(LOOK_SECONDS)
