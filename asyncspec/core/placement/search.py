"""The best placement, exactly: dynamic programming over contiguous cuts and orders of devices.

What a placement is worth falls with the seconds of its slowest stage and with the seconds of the
whole way. So the best one is among those of which no other has both shorter. They are found from
the shortest way on: the shortest of all, then the shortest whose slowest stage is faster than the
last one's, and so on. Each is the shortest path through states (devices in use, the last of them,
layers placed). Equal devices are told apart by nothing, so only how many are in use counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from asyncspec.core.placement.model import (
    FREE,
    Connection,
    Constraints,
    Device,
    Network,
    Placement,
    Span,
    TargetCost,
    evaluate,
)
from asyncspec.core.placement.rate import Rate

Vector = NDArray[np.float64]
State = tuple[tuple[int, ...], int]
"""How many devices of each kind are in use (in a given order: of all), and the last one's kind."""

MAX_STATES = 6000
"""Of which all orders are searched, within seconds; beyond, devices keep their given order."""


def place(
    target: TargetCost,
    devices: Sequence[Device],
    network: Network,
    rate: Rate,
    constraints: Constraints = FREE,
) -> Placement | None:
    """The placement of the highest rate; None where the target fits on no choice of devices."""
    search = _Search(target, devices, network, constraints)
    # No placement's slowest stage is faster than if all devices shared the work evenly.
    total = target.work((0, len(target.layers)))
    floor = total / sum(device.speed for device in devices)
    best, most, bound = None, -math.inf, math.inf
    while (found := search.shortest(bound)) is not None:
        if (value := rate(found.slowest, found.whole)) > most:
            best, most = found, value
        if rate(floor, found.whole) <= most:
            break
        bound = min(found.slowest, math.nextafter(bound, 0.0))
    return best


class _Search:
    def __init__(
        self,
        target: TargetCost,
        devices: Sequence[Device],
        network: Network,
        constraints: Constraints,
    ) -> None:
        self._target, self._network, self._constraints = target, network, constraints
        self._kinds = _kinds(devices, network)
        many = math.prod(len(kind) + 1 for kind in self._kinds) * len(self._kinds)
        self._ordered = constraints.ordered or many > MAX_STATES
        if self._ordered:
            self._kinds = [[device] for device in devices]
        self._seconds = [_span_seconds(target, kind[0]) for kind in self._kinds]

    def shortest(self, bound: float) -> Placement | None:
        """The shortest way of which every stage and link takes less than ``bound`` seconds."""
        layers = len(self._target.layers)
        allowed = [np.where(table < bound, table, np.inf) for table in self._seconds]
        start = np.full(layers + 1, np.inf)
        start[0] = 0.0
        kinds = 1 if self._ordered else len(self._kinds)
        reached: dict[State, Vector] = {((0,) * kinds, -1): start}
        came: dict[tuple[State, int], tuple[State, int]] = {}
        best, least, depth = None, np.inf, 0
        wave = list(reached)
        while wave:
            depth += 1
            following: dict[State, Vector] = {}
            for state in wave:
                for kind, after in self._next(state):
                    self._extend(
                        state, kind, after, reached[state], allowed, bound, following, came
                    )
            reached = following
            wave = [state for state, sums in following.items() if np.isfinite(sums).any()]
            for state in wave:
                last = self._kinds[state[1]][0]
                back = self._network.between(last, self._network.draft).latency
                whole = float(following[state][layers]) + back
                if whole < least and self._constraints.stages in (None, depth):
                    best, least = state, whole
        return None if best is None else self._trace((best, layers), came)

    def _next(self, state: State) -> Iterator[tuple[int, State]]:
        used, last = state
        if self._ordered:
            for kind in range(last + 1, len(self._kinds)):
                yield kind, ((used[0] + 1,), kind)
            return
        for kind, devices in enumerate(self._kinds):
            if used[kind] < len(devices):
                yield kind, ((*used[:kind], used[kind] + 1, *used[kind + 1 :]), kind)

    def _extend(
        self,
        state: State,
        kind: int,
        after: State,
        sums: Vector,
        allowed: Sequence[Vector],
        bound: float,
        following: dict[State, Vector],
        came: dict[tuple[State, int], tuple[State, int]],
    ) -> None:
        """Shortest ways to every end of a stage on a further device."""
        link = self._link(state[1], kind)
        busy = link.row_seconds(self._target.row_bytes) if state[1] >= 0 else 0.0
        if busy >= bound:
            return
        ways = sums[:, None] + allowed[kind]
        firsts = ways.argmin(axis=0)
        found = ways[firsts, np.arange(len(sums))] + link.latency + busy
        known = following.get(after)
        better = np.isfinite(found) if known is None else found < known
        for end in np.flatnonzero(better).tolist():
            came[after, end] = (state, int(firsts[end]))
        following[after] = found if known is None else np.where(better, found, known)

    def _link(self, last: int, kind: int) -> Connection:
        device, network = self._kinds[kind][0], self._network
        if last < 0:
            return network.between(network.draft, device)
        # Two of a kind are two devices.
        other = self._kinds[last][-1] if last == kind else self._kinds[last][0]
        return network.between(other, device)

    def _trace(
        self, at: tuple[State, int], came: dict[tuple[State, int], tuple[State, int]]
    ) -> Placement:
        chosen: list[tuple[int, Span]] = []
        while at in came:
            before = came[at]
            chosen.append((at[0][1], (before[1], at[1])))
            at = before
        pools = [list(kind) for kind in self._kinds]
        placed = [(pools[kind].pop(0), span) for kind, span in reversed(chosen)]
        return evaluate(self._target, self._network, placed)


def _kinds(devices: Sequence[Device], network: Network) -> list[list[Device]]:
    """Devices that are equal but for their names; one with a connection of its own is alone."""
    named = {name for pair in network.pairs for name in pair} | {network.draft.name}

    def key(device: Device) -> tuple[str, ...]:
        own = device.name if device.name in named else ""
        return (own, *map(repr, (device.memory, device.speed, device.latency, device.bandwidth)))

    # The given order decides among equals.
    first = {key(device): number for number, device in reversed([*enumerate(devices)])}
    ordered = sorted(devices, key=lambda device: first[key(device)])
    return [[*group] for _, group in groupby(ordered, key)]


def _span_seconds(target: TargetCost, device: Device) -> Vector:
    """Seconds of a pass over layers [first, end), infinite where it does not fit or cannot be a
    stage: [L+1, L+1]."""
    costs = target.layers
    layers = len(costs)
    held = [layer.weights + target.slots * layer.slot + layer.results for layer in costs]
    memory = _differences(held) + target.other((0, 0))
    memory[0, layers] = target.memory((0, layers))
    ends = np.arange(layers + 1)
    # As ``TargetCost.seconds`` has it, to the bit: the search compares them.
    overhead = target.pass_seconds + target.layer_seconds * (ends - ends[:, None])
    seconds = _differences([layer.work for layer in costs]) / device.speed + overhead
    later = ends[:, None] < ends
    fits: Vector = np.where(later & (memory <= device.memory), seconds, np.inf)
    for span in target.refused:
        fits[span] = np.inf
    return fits


def _differences(values: Sequence[int]) -> NDArray[np.int64]:
    """Sums of values [first, end): [L+1, L+1]."""
    sums = np.cumsum([0, *values], dtype=np.int64)
    return sums[None, :] - sums[:, None]
