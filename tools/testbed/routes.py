"""Which ways lead through the proxy, and what it is to do with each. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from tools.testbed.tables import Description
from tools.testbed.wires import Line, Way, Wire, lines, room, socket_buffer, wires

Address = tuple[str, int]


class Direction(Struct, frozen=True):
    """What happens to bytes one way."""

    latency_seconds: float
    jitter_seconds: float
    seed: int
    # How many bytes may be on the way.
    room: int
    # How many more a socket may hold.
    buffer: int
    # Names of what they have to pass one after another.
    serials: tuple[str, ...] = ()


class Route(Struct, frozen=True):
    """One listening address of the proxy. The dialler's bytes go ``forward``."""

    listen: Address
    connect: Address
    forward: Direction
    backward: Direction


class Orders(Struct, frozen=True):
    """All the proxy has to know."""

    routes: tuple[Route, ...]
    # Rates of the serials, in Mbit/s.
    serials: dict[str, float]


def orders(
    description: Description,
    devices: Sequence[Address],
    proxy: Callable[[Way], Address],
    *,
    shape_lines: bool,
) -> tuple[Orders, dict[Way, Address]]:
    """What the proxy does, and where each device finds each other one.

    ``proxy`` gives the listening address for a way. ``shape_lines``: nothing else holds the
    devices' rates, so the proxy does. A way that differs in nothing from the bare network leads
    straight to the device.
    """
    between, cables = wires(description), lines(description)
    serials: dict[str, float] = {}
    routes: list[Route] = []
    reach: dict[Way, Address] = {}
    for way in between:
        ends = (way, way[::-1])
        passed = [_serials(w, between[w], cables, shape_lines=shape_lines) for w in ends]
        if not any(passed) and not any(_delays(between[w]) for w in ends):
            reach[way] = devices[way[1]]
            continue
        forward, backward = (
            _direction(w, between[w], cables, tuple(names))
            for w, names in zip(ends, passed, strict=True)
        )
        reach[way] = proxy(way)
        routes.append(Route(reach[way], devices[way[1]], forward, backward))
        serials |= passed[0] | passed[1]
    return Orders(tuple(routes), serials), reach


def _delays(wire: Wire) -> bool:
    return wire.latency_seconds > 0 or wire.jitter_seconds > 0


def _serials(
    way: Way, wire: Wire, cables: tuple[Line, ...], *, shape_lines: bool
) -> dict[str, float]:
    first, second = way
    rates = {f"wire {first}-{second}": wire.mbit}
    if shape_lines:
        rates |= {f"up {first}": cables[first].up, f"down {second}": cables[second].down}
    return {name: rate for name, rate in rates.items() if rate is not None}


def _direction(
    way: Way, wire: Wire, cables: tuple[Line, ...], serials: tuple[str, ...]
) -> Direction:
    return Direction(
        latency_seconds=wire.latency_seconds,
        jitter_seconds=wire.jitter_seconds,
        seed=wire.seed,
        room=room(way, wire, cables),
        buffer=socket_buffer(way, wire, cables),
        serials=serials,
    )
