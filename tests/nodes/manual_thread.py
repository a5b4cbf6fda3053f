"""A thread that works when a test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any


class ManualThread:
    """A ``WorkQueue`` on the test's own thread; ``test_worker_thread.py`` compares both."""

    def __init__(self) -> None:
        self._pieces: deque[Callable[[], None]] = deque()
        # What work has raised.
        self.errors: list[Exception] = []

    def submit(
        self, work: Callable[[], Any], done: Callable[[Any], None], failed: Callable[[], None]
    ) -> None:
        self._pieces.append(partial(self._piece, work, done, failed))

    def _piece(
        self, work: Callable[[], Any], done: Callable[[Any], None], failed: Callable[[], None]
    ) -> None:
        try:
            result = work()
        except Exception as error:
            self.errors.append(error)
            failed()
        else:
            done(result)

    def __len__(self) -> int:
        return len(self._pieces)

    def step(self) -> None:
        """The next piece of work, and what comes of it."""
        self._pieces.popleft()()

    def run(self) -> None:
        """All of it."""
        while self._pieces:
            self.step()
