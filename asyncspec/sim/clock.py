"""Virtual time, and what is to happen when."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Event = tuple[float, int, Callable[..., None], tuple[Any, ...]]
"""When, in which order, what, and with what: events of one time happen as they were issued."""


class Clock:
    """``now`` is the virtual time in seconds; whoever takes an event sets it to the event's."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[Event] = []
        self._cancelled: set[int] = set()
        self._order = itertools.count()

    def at(self, when: float, action: Callable[..., None], *with_what: object) -> int:
        """Do something at a time, or now if that is past; returns the number of the event."""
        number = next(self._order)
        now = self.now
        heappush(self._events, (when if when > now else now, number, action, with_what))
        return number

    def cancel(self, number: int) -> None:
        """What has not happened yet never will: it is no event, and time does not wait for it."""
        self._cancelled.add(number)

    def take(self) -> Event | None:
        """The next event, which is then the caller's to let happen; None when none is left."""
        events, cancelled = self._events, self._cancelled
        while events:
            event = heappop(events)
            if event[1] not in cancelled:
                return event
            cancelled.discard(event[1])
        return None
