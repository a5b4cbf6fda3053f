"""From a bed's description to what is between two devices. Pure."""

from __future__ import annotations

from msgspec import Struct

from tools.testbed.tables import Description

Way = tuple[int, int]
"""From a device, to a device."""

BYTES_PER_MBIT = 125_000
"""Bytes a second."""

UNLIMITED_MBIT = 10_000.0
"""What a way without any rate is taken for where a buffer's size must be found."""

SOCKET_SECONDS = 0.02
SOCKET_BYTES = (16_384, 262_144)
"""What a socket of the proxy holds: so much of its way's rate, between these. The kernel's own
growing buffers would hold what should still be at the sender, and fill the lines' queues until
they drop frames."""

CHUNK = 65_536
"""The most bytes that are taken from a socket at once."""


class Wire(Struct, frozen=True):
    """One way between two devices."""

    latency_seconds: float
    # The most that is added to it.
    jitter_seconds: float
    # Of this way alone, in Mbit/s; None: only the two devices' lines bound it.
    mbit: float | None
    # Seeds this way's jitter.
    seed: int


class Line(Struct, frozen=True):
    """A device's line to the switch, in Mbit/s each way; None is unlimited."""

    up: float | None
    down: float | None


def lines(description: Description) -> tuple[Line, ...]:
    """The line of each device."""
    common = description.network.mbit
    found = []
    for device in description.device:
        both = common if device.mbit is None else device.mbit
        up = both if device.up_mbit is None else device.up_mbit
        down = both if device.down_mbit is None else device.down_mbit
        found.append(Line(up, down))
    return tuple(found)


def wires(description: Description) -> dict[Way, Wire]:
    """The wire of each ordered pair of devices."""
    count = len(description.device)
    given = {}
    for link in description.link:
        given[link.between] = link
        if not link.one_way:
            given[link.between[::-1]] = link
    network, found = description.network, {}
    for way in ((i, j) for i in range(count) for j in range(count) if i != j):
        own = given.get(way)
        latency = None if own is None else own.latency_ms
        jitter = None if own is None else own.jitter_ms
        found[way] = Wire(
            latency_seconds=(network.latency_ms if latency is None else latency) / 1000,
            jitter_seconds=(network.jitter_ms if jitter is None else jitter) / 1000,
            mbit=None if own is None else own.mbit,
            seed=description.seed * 1_000_003 + way[0] * 1009 + way[1],
        )
    return found


def slowest(way: Way, wire: Wire, devices: tuple[Line, ...]) -> float:
    """The rate of a way, lines included, in Mbit/s."""
    rates = (wire.mbit, devices[way[0]].up, devices[way[1]].down)
    return min((rate for rate in rates if rate is not None), default=UNLIMITED_MBIT)


def room(way: Way, wire: Wire, devices: tuple[Line, ...]) -> int:
    """How many bytes may be on the way at once: the bandwidth-delay product, and two chunks, as
    sockets are read by chunks."""
    delay = wire.latency_seconds + wire.jitter_seconds
    return int(slowest(way, wire, devices) * BYTES_PER_MBIT * delay) + 2 * CHUNK


def socket_buffer(way: Way, wire: Wire, devices: tuple[Line, ...]) -> int:
    """How many bytes of this way a socket of the proxy may hold."""
    least, most = SOCKET_BYTES
    wanted = int(slowest(way, wire, devices) * BYTES_PER_MBIT * SOCKET_SECONDS)
    return max(least, min(most, wanted))
