"""When a silent peer counts as gone. Pure.

Both ends of a link send a heartbeat every interval. Either of two rules ends the link.

- The **machine**, or the way to it, is gone when its kernel has acknowledged nothing during
  ``LOST_BEATS`` intervals in which data waited for it. A kernel acknowledges whatever its processes
  do, so neither load nor a stopped process delays that.
- The **process** is gone when nothing has come from it for the longest silence allowed, which no
  load, garbage collection or swapping takes.

Intervals are counted, not seconds: while this node was stopped, or held up itself, none pass.
``TCP_USER_TIMEOUT`` is no substitute on links: it also ends those whose peer has not read for so
long, and a node may hold its reading (``Link.hold_reading``).
"""

from __future__ import annotations

from msgspec import Struct

LOST_BEATS = 4
"""Intervals of .5 s without an acknowledgement: the fourth attempt of a kernel comes 1.4 s after
the first one on a LAN. A pulled cable is noticed 2 to 2.5 s later."""

JIFFY_SECONDS = 10e-3
"""The time since an acknowledgement is rounded up by less."""


class PathState(Struct, frozen=True):
    """What the kernel knows of a connection."""

    # Whether data waits for an acknowledgement, and how many seconds ago the last one came.
    unacknowledged: bool
    since_acknowledgement: float


class SilenceWatch:
    """Silence of one link's peer, from the handshake on. ``interval``: seconds between heartbeats;
    ``longest``: seconds that its process may be silent; ``now``: by any clock."""

    def __init__(self, interval: float, longest: float, now: float) -> None:
        self._interval = interval
        self._longest = longest
        self._checked = now
        # Intervals without a byte, and without an acknowledgement of what waits for one.
        self._silent = self._unacknowledged = 0

    def received(self) -> None:
        """Bytes have come, or are not read here."""
        self._silent = 0

    def check(self, path: PathState | None, now: float) -> str:
        """Called every interval. Returns why the peer is gone, or nothing. ``path``: None where the
        system does not say."""
        passed, self._checked = now - self._checked, now
        self._silent += 1
        recent = path is None or path.since_acknowledgement < passed + JIFFY_SECONDS
        waits = path is not None and path.unacknowledged and not recent
        self._unacknowledged = self._unacknowledged + 1 if waits else 0
        if self._unacknowledged >= LOST_BEATS:
            seconds = f"{self._unacknowledged * self._interval:.2g} s"
            return f"its machine or the network is down: no acknowledgement in {seconds}"
        if self._silent * self._interval > self._longest:
            return f"silent for {self._longest:.2g} s"
        return ""
