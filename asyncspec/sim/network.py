"""Virtual time, and the links of a simulated cluster.

Links are first-in first-out, with a delay per message. With ``wires`` messages occupy their link
for some time, and every session's bytes are counted, as the runtime does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container
from heapq import heappop, heappush
from typing import Any

from msgspec import Struct

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.machine import Received
from asyncspec.sim.costs import CostModel, Costs
from asyncspec_protocol.framing import frame_bytes
from asyncspec_protocol.ids import Rank, SessionId
from asyncspec_protocol.messages import Close, Message, Restore

Event = tuple[float, int, Callable[..., None], tuple[Any, ...]]
"""Time, number, action and its arguments: events of one time happen as they were issued."""


class VirtualClock:
    """``now`` is the virtual time in seconds; the caller of ``take`` sets it to the event's."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[Event] = []
        self._cancelled: set[int] = set()
        self._order = itertools.count()

    def at(self, when: float, action: Callable[..., None], *arguments: object) -> int:
        """Call ``action`` at a time, or now if that is past; returns the number of the event."""
        number = next(self._order)
        now = self.now
        heappush(self._events, (when if when > now else now, number, action, arguments))
        return number

    def cancel(self, number: int) -> None:
        """An event that has not happened yet never will, and time does not wait for it."""
        self._cancelled.add(number)

    def take(self) -> Event | None:
        """Remove the next event; None when none is left."""
        events, cancelled = self._events, self._cancelled
        while events:
            event = heappop(events)
            if event[1] not in cancelled:
                return event
            cancelled.discard(event[1])
        return None


class Channel(Struct):
    """One direction of a link."""

    source: Rank
    target: Rank
    # When it is free, and when its last message arrives.
    free: float
    arrival: float
    # False once the link is down: what is on the way is lost.
    up: bool = True


class Network:
    """The links that are up."""

    def __init__(
        self,
        clock: VirtualClock,
        costs: Costs,
        wires: CostModel | None,
        received: Callable[[Rank, Received], None],
        recorded: Container[Rank],
    ) -> None:
        """``received`` is called at the target; messages of ``recorded`` always have sizes."""
        self._clock = clock
        self._costs = costs
        self._wires = wires
        self._received = received
        self._recorded = recorded
        self._channels: dict[tuple[Rank, Rank], Channel] = {}
        # Bytes written by a node for a session that is open.
        self.session_bytes: dict[tuple[Rank, SessionId], int] = {}

    def channel(self, source: Rank, target: Rank) -> Channel | None:
        """From one node to another, if the link is up."""
        return self._channels.get((source, target))

    def peers(self, rank: Rank) -> list[Rank]:
        """Nodes linked to a node."""
        return [one for one, other in self._channels if other == rank]

    def connect(self, first: Rank, second: Rank) -> bool:
        """Bring up a link; False where it is up already."""
        if (first, second) in self._channels:
            return False
        now = self._clock.now
        for source, target in ((first, second), (second, first)):
            self._channels[source, target] = Channel(source, target, free=now, arrival=now)
        return True

    def cut(self, first: Rank, second: Rank) -> bool:
        """Take down a link; False where it is down already. What is on the way is lost."""
        severed = self.sever(first, second)
        for channel in severed:
            channel.up = False
        return bool(severed)

    def sever(self, first: Rank, second: Rank) -> tuple[Channel, ...]:
        """Let no more messages onto a link; what is on the way arrives while its channel is up.
        Returns the two channels, from ``first`` first, or none where the link is down already."""
        if (first, second) not in self._channels:
            return ()
        return self._channels.pop((first, second)), self._channels.pop((second, first))

    def send(self, channel: Channel, message: Message, handle: object | None) -> int:
        """Send a message, with the receiver's handle to its rows. Returns its bytes if measured."""
        source, target, wires = channel.source, channel.target, self._wires
        now, seconds = self._clock.now, 0.0
        sent = channel.free if channel.free > now else now
        if wires is not None:
            sent += wires.occupied_seconds(message)
            if handle is not None and wires.nbytes(message) >= PARAMETERS.min_frame_bytes:
                seconds = wires.transfer_seconds(message)
        arrival = max(channel.arrival, sent + self._costs.link(source, target, message))
        channel.free, channel.arrival = sent, arrival
        self._clock.at(arrival, self._arrive, channel, Received(source, message, handle, seconds))
        return self._measure(source, message)

    def take_bytes(self, rank: Rank, session: SessionId) -> int:
        """Bytes a node has written for a session so far, which are counted no further."""
        return self.session_bytes.pop((rank, session), 0)

    def _arrive(self, channel: Channel, event: Received) -> None:
        if channel.up:
            self._received(channel.target, event)

    def _measure(self, source: Rank, message: Message) -> int:
        """Bytes of a message, counted for its session as in ``asyncspec.actor.routing``."""
        session = getattr(message, "session", None)
        if self._wires is None or session is None:
            if source not in self._recorded:
                return 0
            return frame_bytes(message) if self._wires is None else self._wires.nbytes(message)
        size, key = self._wires.nbytes(message), (source, session)
        if not isinstance(message, Close | Restore) or key in self.session_bytes:
            self.session_bytes[key] = self.session_bytes.get(key, 0) + size
        return size
