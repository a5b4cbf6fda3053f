"""How often a peer is told that this node lives, and when a silent peer counts as lost. Pure.

Two things can be silent. The **machine**, or the way to it: a kernel acknowledges what comes
whatever its processes do, so data without an acknowledgement means that it is gone, after a few
retransmissions. The **process** of a machine that acknowledges: it may only be slow, on busy cores
or behind a call that holds the interpreter lock. What it sends says by how much it is late as a
rule, and it is given ten times that. Where this node itself is late, its peers may be so as well:
what keeps the cores busy here may do so there, or is there; and so where more wants to run here
than there are processors for. On a quiet LAN either takes less than a second.

Any bytes break silence, so a heartbeat is due only where nothing was written in the last half of an
interval: beside weights that sweep the caches, to send one and to receive one take .1 ms each. No
gap is longer than one interval and a half.
"""

from __future__ import annotations

import math

from msgspec import Struct

LEAST_BEAT_SECONDS = 0.2
"""Seconds between two heartbeats on a LAN: a link's cost 0.1 % of a core."""

BEAT_TRIPS = 2.0
"""Round trips between two heartbeats, where that is more."""

QUIET_SHARE = 0.5
"""Share of an interval without bytes to a peer after which a heartbeat is due."""

LEAST_RTO_SECONDS = 0.2
"""Linux's least allowance for delay before it retransmits, on top of the round trip."""

NEAR_TIMEOUTS, FAR_TIMEOUTS = 3.0, 7.0
"""Retransmission timeouts without an acknowledgement after which a peer is gone: the second attempt
is one and the third three timeouts after the first one, the fourth seven. A LAN loses no packet
twice, a WAN none thrice."""

FAR_SECONDS = 20e-3
"""Round trip from which a peer is on a WAN."""

LEAST_SILENCE_SECONDS = 0.7
"""Least silence after which a punctual process is lost: a garbage collection takes .3 s."""

SILENT_BEATS = 3.0
LATE_FACTOR = 10.0
"""A process is lost when it has been silent for so many beats, and so many times its lateness."""

FADING = 0.97
"""Factor of the greatest lateness with each interval in which something came."""

FIRST_LATENESS, FIRST_FADING = 0.2, 0.75
"""Assumed of a new peer, and at most where this node is late, in seconds; and its factor with each
such interval: six, 1.2 seconds on a LAN, show that it is quick."""

MOST_LOAD = 2.0
"""Runnable threads a processor of this machine up to which a process is as quick as said above:
beyond, what holds it up takes as much longer."""

JIFFY_SECONDS = 10e-3
"""The time since an acknowledgement is rounded up by less."""

LEAST_PAUSE = 1e-3
"""Seconds between two checks at least."""


class PathState(Struct, frozen=True):
    """What the kernel knows of a connection, in seconds."""

    # Whether data waits for an acknowledgement, and how long ago the last one came.
    unacknowledged: bool
    since_acknowledgement: float
    # Round trip: smoothed, its mean deviation, and the least one.
    srtt: float
    rttvar: float
    least_rtt: float


def beat_seconds(rtt: float | None, longest: float) -> float:
    """Seconds between two heartbeats on a link with round trip ``rtt``; at most ``longest``."""
    return min(longest, max(LEAST_BEAT_SECONDS, BEAT_TRIPS * (rtt or 0.0)))


def beat_due(interval: float, longest: float, since_written: float, since_beat: float) -> bool:
    """Whether a heartbeat is to be sent, ``since_written`` seconds after the last bytes; also
    beside other bytes after ``longest``, as heartbeats alone report round trip and bandwidth."""
    return since_written >= QUIET_SHARE * interval or since_beat >= longest - QUIET_SHARE * interval


def next_check(now: float, pause: float, interval: float) -> float:
    """When a link is checked again, ``pause`` seconds from now: all links of a process that have
    one interval at the same times, so that they wake it once."""
    if pause < interval:
        return now + pause
    early = 0.02 * interval  # by which a timer may fire too soon
    return interval * (math.floor((now + early) / interval) + 1)


def path_limit(path: PathState) -> float:
    """Seconds without an acknowledgement after which a peer's machine is gone."""
    timeout = path.srtt + max(LEAST_RTO_SECONDS, 4 * path.rttvar)
    far = min(1.0, path.least_rtt / FAR_SECONDS)
    return timeout * (NEAR_TIMEOUTS + far * (FAR_TIMEOUTS - NEAR_TIMEOUTS))


class SilenceWatch:
    """Silence of one link's peer, from the handshake on. ``longest``: the limit of any silence, in
    seconds."""

    def __init__(self, longest: float, now: float) -> None:
        # Runnable threads a processor of this machine.
        self.load = 0.0
        self._most = longest
        # By how much the peer has lately been late at most, and is assumed to be.
        self._lateness = 0.0
        self._assumed = FIRST_LATENESS
        # Whether it has sent a heartbeat; until then it may be no peer that does.
        self._beats = False
        # Seconds since anything came, as far as this node was awake: one that was stopped, or busy,
        # has not read what waits for it.
        self._silent = 0.0
        self._counted = self._checked = now
        # Whether anything has come since the last check.
        self.has_received = False
        # Since the oldest heartbeat without an acknowledgement was sent, seconds awake.
        self._waited = 0.0

    def received(self, interval: float, now: float) -> None:
        """Bytes have come. ``interval``: between heartbeats."""
        self._silent += min(now - self._counted, interval)
        late = self._silent - (1 + QUIET_SHARE) * interval
        if late > self._lateness:
            self._lateness = late
        self._counted, self._silent, self.has_received = now, 0.0, True

    def beat(self) -> None:
        """A heartbeat has come."""
        self._beats = True

    def restart(self) -> None:
        """Count silence from now on: heartbeats are to come more often, or were not read."""
        self._silent = 0.0

    def limit(self, path: PathState | None, interval: float) -> float:
        """Seconds of silence after which the peer's process is given up."""
        if not self._beats:
            return self._most
        slow = SILENT_BEATS * interval + LATE_FACTOR * max(self._lateness, self._assumed)
        slow = max(LEAST_SILENCE_SECONDS, slow) * max(1.0, self.load / MOST_LOAD)
        lost = 0.0 if path is None else path_limit(path)
        return min(self._most, max(slow, lost))

    def check(self, path: PathState | None, interval: float, now: float) -> str:
        """Why the peer is lost, or nothing; the next check is due after ``pause``. ``path``: None
        where the system does not say, or what has been heard since the last check says enough."""
        passed = now - self._checked
        if self.has_received:
            self.has_received = False
            self._lateness *= FADING
            self._assumed *= FIRST_FADING
        self._assumed = max(self._assumed, min(passed - interval, FIRST_LATENESS))
        recent = path is None or path.since_acknowledgement < passed + JIFFY_SECONDS
        if path is None or not path.unacknowledged or recent:
            self._waited = 0.0
        else:
            # What was written before this node slept may have been sent after it.
            self._waited += min(passed, interval)
        self._silent += min(now - self._counted, 2 * interval)
        self._counted = self._checked = now
        if path is not None and self._waited > min(self._most, path_limit(path)):
            waited = f"{self._waited:.2g}"
            return f"its machine or the network is down: no acknowledgement in {waited} s"
        limit = self.limit(path, interval)
        return f"silent for {limit:.2g} s" if self._silent > limit else ""

    def pause(self, path: PathState | None, interval: float) -> float:
        """Seconds from a check to the next: a heartbeat's, or less where the peer is lost then."""
        left = self.limit(path, interval) - self._silent
        if path is not None:
            left = min(left, min(self._most, path_limit(path)) - self._waited)
        return min(interval, max(0.0, left) + LEAST_PAUSE)
