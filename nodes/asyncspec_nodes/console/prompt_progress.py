"""How far a prompt has been read, and how long the rest is expected to take. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable


class PromptProgress:
    """One prompt, from its first report on. Tokens of the prefix cache take no time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun: tuple[float, int] | None = None

    def line(self, read: int, total: int) -> str:
        """What to show once ``read`` of ``total`` tokens are read."""
        now = self._clock()
        if self._begun is None:
            self._begun = now, read
        text = f"{read:,} of {total:,} tokens"
        since, first = self._begun
        if read <= first or now <= since:
            return text
        left = (total - read) * (now - since) / (read - first)
        return f"{text}, {max(1, round(left))} s more"
