"""The best placement, exactly: dynamic programming over contiguous cuts and orders of devices.

What a placement is worth falls with the seconds of its slowest stage and with the seconds of the
whole way. So the best one is among those of which no other has both shorter. The shortest way whose
slowest stage is faster than a bound also bounds what all others below that bound are worth: bounds
are halved, fast stages first, and ranges that cannot hold a better placement are left out. Each is
the shortest path through states (devices in use, the last of them, layers placed). Equal devices
are told apart by nothing, so only how many are in use counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from asyncspec.placement.model import (
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
from asyncspec.placement.rate import Rate

Vector = NDArray[np.float64]
State = tuple[tuple[int, ...], int]
"""How many devices of each kind are in use (in a given order: of all, where a number of stages is
asked for), and the last one's kind."""

Origins = dict[State, list[tuple[State, int]]]
"""By state and end of its last stage: the state before, and where that stage begins."""

MAX_WORK = 80_000_000
"""Upper bound on ``order_work`` up to which all orders are searched, within seconds; beyond,
devices keep the order they come in."""


def order_work(layers: int, kinds: Sequence[int]) -> int:
    """About how many sums a search of all orders takes for each shortest way: states, kinds of
    devices that each goes on with, and spans of layers. ``kinds``: how many devices of each."""
    states = math.prod(count + 1 for count in kinds) * len(kinds)
    return states * len(kinds) * (layers + 1) ** 2


def keeps_order(target: TargetCost, devices: Sequence[Device], network: Network) -> bool:
    """Whether ``place`` leaves devices in their given order since there are too many others."""
    return _too_many(target, _kinds(devices, network))


def _too_many(target: TargetCost, kinds: Sequence[Sequence[Device]]) -> bool:
    return order_work(len(target.layers), [*map(len, kinds)]) > MAX_WORK


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
    best, best_rate = None, -math.inf
    # Where a better one may be: seconds of its slowest stage, from and below; at least of its way.
    waiting = [(floor, math.inf, 0.0)]
    while waiting:
        low, high, least = waiting.pop()
        if best is not None and rate(low, least) <= best_rate:
            continue
        if (placement := search.shortest(high)) is None:
            continue
        if (value := rate(placement.slowest, placement.whole)) > best_rate:
            best, best_rate = placement, value
        high = min(placement.slowest, math.nextafter(high, 0.0))
        middle = (low + high) / 2
        if low < middle < high:
            waiting += [(middle, high, placement.whole), (low, middle, placement.whole)]
        elif low <= high:
            waiting.append((low, high, placement.whole))
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
        self._ordered = constraints.ordered or _too_many(target, self._kinds)
        if self._ordered:
            self._kinds = [[device] for device in devices]
        # [end, first]: a stage's begin is sought among numbers that lie side by side.
        self._seconds = [np.ascontiguousarray(_span_seconds(target, k[0]).T) for k in self._kinds]

    def shortest(self, bound: float) -> Placement | None:
        """The shortest way of which every stage and link takes less than ``bound`` seconds."""
        layers, stages = len(self._target.layers), self._constraints.stages
        allowed = [np.where(table < bound, table, np.inf) for table in self._seconds]
        start = np.full(layers + 1, np.inf)
        start[0] = 0.0
        root: State = ((0,) * (1 if self._ordered else len(self._kinds)), -1)
        reached: dict[State, Vector] = {root: start}
        came: Origins = {}
        # Fewest devices first, and earlier ones: all ways to a state are known when it is taken.
        waiting = [(0, -1, 0, root)]
        best, least = None, np.inf
        while waiting:
            *_, state = heappop(waiting)
            sums, last, count = reached.pop(state), state[1], sum(state[0])
            if last >= 0 and stages in (None, count):
                back = self._network.between(self._kinds[last][0], self._network.draft).latency
                if (whole := float(sums[layers]) + back) < least:
                    best, least = state, whole
            for kind, after in self._next(state):
                extension = self._extend(state, kind, sums, allowed[kind], bound)
                if extension is not None and self._merge(state, after, *extension, reached, came):
                    place_in_order = after[1] if self._ordered else 0
                    heappush(waiting, (sum(after[0]), place_in_order, len(came), after))
        return None if best is None else self._trace((best, layers), came)

    def _next(self, state: State) -> Iterator[tuple[int, State]]:
        (used, last), stages = state, self._constraints.stages
        if stages is not None and sum(used) >= stages:
            return
        if self._ordered:
            # Enough are left behind it.
            needed = 0 if stages is None else stages - used[0] - 1
            count = 0 if stages is None else used[0] + 1
            for kind in range(last + 1, len(self._kinds) - needed):
                yield kind, ((count,), kind)
            return
        for kind, devices in enumerate(self._kinds):
            if used[kind] < len(devices):
                yield kind, ((*used[:kind], used[kind] + 1, *used[kind + 1 :]), kind)

    def _extend(
        self, state: State, kind: int, sums: Vector, allowed: Vector, bound: float
    ) -> tuple[Vector, NDArray[np.intp]] | None:
        """Shortest ways to every end of a stage on a further device, and where it begins."""
        link = self._link(state[1], kind)
        busy = link.row_seconds(self._target.row_bytes) if state[1] >= 0 else 0.0
        if busy >= bound:
            return None
        ways = sums + allowed
        firsts = ways.argmin(axis=1)
        seconds: Vector = ways[np.arange(len(sums)), firsts] + link.latency + busy
        return (seconds, firsts) if np.isfinite(seconds).any() else None

    @staticmethod
    def _merge(
        state: State,
        after: State,
        sums: Vector,
        firsts: NDArray[np.intp],
        reached: dict[State, Vector],
        came: Origins,
    ) -> bool:
        """Keep what is shorter than other ways to the state ``after``; whether it is new."""
        origins = [(state, first) for first in firsts.tolist()]
        current = reached.get(after)
        if current is None:
            reached[after], came[after] = sums, origins
            return True
        for end in np.flatnonzero(sums < current).tolist():
            came[after][end] = origins[end]
        np.minimum(current, sums, out=current)
        return False

    def _link(self, last: int, kind: int) -> Connection:
        device, network = self._kinds[kind][0], self._network
        if last < 0:
            return network.between(network.draft, device)
        # Two of a kind are two devices.
        previous = self._kinds[last][-1] if last == kind else self._kinds[last][0]
        return network.between(previous, device)

    def _trace(self, at: tuple[State, int], came: Origins) -> Placement:
        chosen: list[tuple[int, Span]] = []
        while (state := at[0]) in came:
            origin = came[state][at[1]]
            chosen.append((state[1], (origin[1], at[1])))
            at = origin
        pools = [list(kind) for kind in self._kinds]
        placed = [(pools[kind].pop(0), span) for kind, span in reversed(chosen)]
        return evaluate(self._target, self._network, placed)


def _kinds(devices: Sequence[Device], network: Network) -> list[list[Device]]:
    """Devices that are equal but for their names; one with a connection of its own is alone."""
    named = {name for pair in network.pairs for name in pair} | {network.draft.name}

    def key(device: Device) -> tuple[str, ...]:
        name = device.name if device.name in named else ""
        return (name, *map(repr, (device.memory, device.speed, device.latency, device.bandwidth)))

    # The given order decides among equals.
    first = {key(device): number for number, device in reversed([*enumerate(devices)])}
    ordered = sorted(devices, key=lambda device: first[key(device)])
    return [[*group] for _, group in groupby(ordered, key)]


def _span_seconds(target: TargetCost, device: Device) -> Vector:
    """Seconds of a pass over layers [first, end), infinite where it does not fit or cannot be a
    stage: [L+1, L+1]."""
    costs = target.layers
    layers = len(costs)
    held = [layer.weights + target.layer_cache(layer) + layer.results for layer in costs]
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
