"""When bytes that arrive at a wire's one end leave it at the other. Pure.

A wire delays; it never reorders. Bytes first take their turn on the lines the wire leads over, each
with a rate; then they are on the way for the latency and a jitter. Bytes that follow each other
closely share one draw: else a message of many pieces would always have the worst of many draws.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncspec.core.rng import uniform

BURST_SECONDS = 0.001
"""A pause as long as this begins a new burst."""

PAYLOAD_SHARE = 1448 / 1538
"""Of an Ethernet line's bytes: preamble, headers, check sum and gap take the rest (IPv4, TCP with
time stamps, 1500 bytes MTU)."""


class Serial:
    """What carries one byte after another, at a rate: a device's line, one way, or a wire's own."""

    def __init__(self, mbit: float) -> None:
        """``mbit``: line rate in Mbit/s, framing included."""
        self._seconds_per_byte = 8e-6 / (mbit * PAYLOAD_SHARE)
        self._free = 0.0

    def book(self, now: float, size: int) -> float:
        """``size`` bytes come at ``now`` and take their turn: when the last of them is through."""
        self._free = max(self._free, now) + size * self._seconds_per_byte
        return self._free


class Schedule:
    """The release times of one direction of one connection. Times are seconds on any one clock."""

    def __init__(
        self,
        latency_seconds: float,
        jitter_seconds: float = 0.0,
        seed: int = 0,
        serials: Sequence[Serial] = (),
    ) -> None:
        self._latency = latency_seconds
        self._jitter = jitter_seconds
        self._seed = seed
        self._serials = serials
        self._bursts = 0
        self._last_arrival: float | None = None
        self._extra = 0.0
        self._last_release = 0.0

    def release(self, now: float, size: int) -> float:
        """When ``size`` bytes that arrive at ``now`` come out; arrivals never go back in time.

        The lines are a fluid: all of them carry the same byte at once, so a message takes the time
        of the slowest, as through switches that forward frame by frame.
        """
        through = max((serial.book(now, size) for serial in self._serials), default=now)
        through = max(through, now)
        if self._last_arrival is None or now - self._last_arrival >= BURST_SECONDS:
            self._extra = self._jitter * uniform(self._seed, self._bursts) if self._jitter else 0.0
            self._bursts += 1
        self._last_arrival = now
        self._last_release = max(self._last_release, through + self._latency + self._extra)
        return self._last_release
