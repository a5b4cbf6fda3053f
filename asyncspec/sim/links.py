"""Virtual time, and what is to happen when."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container
from heapq import heappop, heappush
from typing import Any

from msgspec import Struct

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.machine import Received
from asyncspec.sim.costs import Costs, Wires
from asyncspec_protocol.framing import frame_bytes
from asyncspec_protocol.ids import Rank, SessionId
from asyncspec_protocol.messages import Close, Message

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


# --- Links of a simulated cluster: first-in first-out, with a delay per message, and counted
# bytes.


class Line(Struct):
    """One direction of a link."""

    source: Rank
    target: Rank
    # When it is free, and when its last message arrives.
    free: float
    arrival: float
    # False once the link was taken down: what is on the way is gone.
    up: bool = True


class Lines:
    """The links that are up. With ``wires`` messages take their time to leave, and every session's
    bytes are counted, as the runtime does.

    ``arrived`` is told of each message at its end of the line. ``recorded``: nodes whose messages
    are measured also where no bytes are counted.
    """

    def __init__(
        self,
        clock: Clock,
        costs: Costs,
        wires: Wires | None,
        arrived: Callable[[Rank, Received], None],
        recorded: Container[Rank],
    ) -> None:
        self._clock = clock
        self._costs = costs
        self._wires = wires
        self._arrived = arrived
        self._recorded = recorded
        # By their ends.
        self._up: dict[tuple[Rank, Rank], Line] = {}
        # Bytes written for a session, by node.
        self.books: dict[tuple[Rank, SessionId], int] = {}

    def find(self, source: Rank, target: Rank) -> Line | None:
        """The line from one node to another, if it is up."""
        return self._up.get((source, target))

    def peers(self, rank: Rank) -> list[Rank]:
        """Who is linked to a node."""
        return [one for one, other in self._up if other == rank]

    def connect(self, one: Rank, other: Rank) -> bool:
        """Bring up a link; False where it is up already."""
        if (one, other) in self._up:
            return False
        now = self._clock.now
        for source, target in ((one, other), (other, one)):
            self._up[source, target] = Line(source, target, free=now, arrival=now)
        return True

    def cut(self, one: Rank, other: Rank) -> bool:
        """Take down a link; what is on the way is gone. False where it is down already."""
        if (one, other) not in self._up:
            return False
        for ends in ((one, other), (other, one)):
            self._up.pop(ends).up = False
        return True

    def send(self, line: Line, message: Message, handle: object | None) -> int:
        """Put a message on a line, with the receiver's handle to its rows. Its bytes; 0 where
        nobody wants to know."""
        source, target, wires = line.source, line.target, self._wires
        now = self._clock.now
        sent = line.free if line.free > now else now
        if wires is not None:
            sent += wires.occupied(source, target, message)
        arrival = max(line.arrival, sent + self._costs.link(source, target, message))
        line.free, line.arrival = sent, arrival
        seconds = 0.0 if handle is None else self._line_seconds(message)
        self._clock.at(arrival, self._arrive, line, Received(source, message, handle, seconds))
        return self._measure(source, message)

    def take_bytes(self, rank: Rank, session: SessionId) -> int:
        """Bytes a node has written for a session so far; the count starts anew."""
        return self.books.pop((rank, session), 0)

    def _arrive(self, line: Line, event: Received) -> None:
        if line.up:
            self._arrived(line.target, event)

    def _line_seconds(self, message: Message) -> float:
        """What a node learns of the line by a message with a tensor: something if it is large."""
        if self._wires is None or self._wires.nbytes(message) < PARAMETERS.min_frame_bytes:
            return 0.0
        return self._wires.carried(message)

    def _measure(self, source: Rank, message: Message) -> int:
        """Bytes of a message, booked for its session."""
        if self._wires is None:
            return frame_bytes(message) if source in self._recorded else 0
        session = getattr(message, "session", None)
        if session is None:
            return self._wires.nbytes(message) if source in self._recorded else 0
        size, key = self._wires.nbytes(message), (source, session)
        # The end of a prompt that was kept comes when its session's books are closed, as in Link.
        if isinstance(message, Close) and key not in self.books:
            return size
        self.books[key] = self.books.get(key, 0) + size
        return size
