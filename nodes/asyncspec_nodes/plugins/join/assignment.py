"""Who holds which stage: at first, and after a machine has left for good. Pure.

The number of stages never changes, so that the draft node and its requests survive: where fewer
machines remain, some of them run two stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec import Struct

from asyncspec.placement.model import Constraints, Device, Network, Span, TargetCost
from asyncspec.placement.rate import throughput_rate
from asyncspec.placement.search import place
from asyncspec_nodes.plugins.join.messages import PORTS

WORTH = 1.5
"""Times as fast that splitting all layers anew has to make the slowest machine: every stage is
loaded again, where else only the lost one is."""


AS_FAST = 1.05
"""Times as long as the fastest one's that a pass of a machine that is as fast may take: measured
speeds of one machine differ by as much."""


class Assigned(Struct, frozen=True):
    """A stage: the machine's name and the number of its port, and its layers [first, end)."""

    member: str
    port: int
    layers: Span


Assignment = tuple[Assigned, ...]
"""By rank, from 1 on."""


def first_assignment(
    target: TargetCost, devices: Sequence[Device], sessions: int, stages: int | None
) -> Assignment | None:
    """The best one; None where the target does not fit."""
    rate = throughput_rate(sessions)
    found = place(target, devices, Network(), rate, Constraints(stages))
    if found is None:
        return None
    return _with_ports([(stage.device.name, stage.layers) for stage in found.stages])


def after_loss(
    target: TargetCost,
    devices: Sequence[Device],
    old: Assignment,
    sessions: int,
    processors: Mapping[str, str] = {},
    prepared: Collection[str] = (),
) -> Assignment | None:
    """Machines of ``old`` that are not among ``devices`` have left for good. A spare takes a lost
    stage's place; without one, machines with room for it do, or all layers are split anew. None
    where the target does not fit any more. ``processors``: kinds of the machines of ``old``; among
    machines that are as fast, one of the lost one's kind goes on. ``prepared``: those that have
    imported what a stage needs, which takes longer than to load many a stage."""
    by_name = {device.name: device for device in devices}
    kept = _with_replacements(target, by_name, old, processors, prepared)
    if kept is not None and all(count == 1 for count in _stages(kept).values()):
        return kept
    ready = {*prepared, *(one.member for one in old)}
    others = {name: one for name, one in by_name.items() if kept is None or name in ready}
    fresh = _split_anew(target, others, len(old), sessions)
    if kept is None or fresh is None:
        return kept or fresh
    faster = slowest(target, by_name, kept) > WORTH * slowest(target, by_name, fresh)
    return fresh if faster else kept


def in_case_of_loss(
    repaired: Callable[[], Assignment | None], old: Assignment, here: Collection[str]
) -> dict[int, Assigned]:
    """By rank, stages that machines which are ``here`` would hold after the loss of the others by
    ``repaired``: what they may load at once. None where one would have to give layers up for it."""
    new = repaired() if here else None
    if new is None or any(a.member in here and a != b for a, b in zip(old, new, strict=True)):
        return {}
    return {rank: to for rank, to in enumerate(new, start=1) if to != old[rank - 1]}


def by_cost(target: TargetCost, assignment: Assignment) -> list[Assigned]:
    """Stages, the one first whose loss costs most: of which most has to be read to load it."""
    return sorted(assignment, key=lambda one: -target.memory(one.layers))


def relieved(
    target: TargetCost, devices: Sequence[Device], old: Assignment, prepared: Collection[str]
) -> Assignment | None:
    """One of the stages of a machine that runs several on a ``prepared`` one that runs none; None
    where that is not worth loading it again."""
    by_name = {device.name: device for device in devices}
    counts = _stages(old)
    idle = [one for one in devices if not counts[one.name] and one.name in prepared]
    options = []
    for rank, one in enumerate(old):
        if counts[one.member] < 2:
            continue
        for device in idle:
            placed = [(other.member, other.layers) for other in old]
            placed[rank] = (device.name, one.layers)
            moved = _keeping_ports(old, placed)
            if fits(target, by_name, moved):
                options.append((slowest(target, by_name, moved), rank, device.name, moved))
    if not options or slowest(target, by_name, old) <= WORTH * min(options)[0]:
        return None
    return min(options)[3]


def slowest(target: TargetCost, devices: Mapping[str, Device], assignment: Assignment) -> float:
    """Seconds of the slowest machine's passes; stages of one machine share it."""
    seconds: Counter[str] = Counter()
    for one in assignment:
        seconds[one.member] += target.seconds(one.layers, devices[one.member].speed)  # type: ignore[assignment]
    return max(seconds.values())


def predicted(
    target: TargetCost, devices: Sequence[Device], assignment: Assignment, sessions: int
) -> float:
    """Tokens a second of so many answers at a time, without speculation and links."""
    by_name = {device.name: device for device in devices}
    whole = sum(target.seconds(one.layers, by_name[one.member].speed) for one in assignment)
    return throughput_rate(sessions)(slowest(target, by_name, assignment), whole)


def fits(target: TargetCost, devices: Mapping[str, Device], assignment: Assignment) -> bool:
    """Whether every machine has memory and ports for its stages."""
    memory: Counter[str] = Counter()
    for one in assignment:
        memory[one.member] += target.memory(one.layers)
    few = all(count <= PORTS for count in _stages(assignment).values())
    return few and all(needed <= devices[name].memory for name, needed in memory.items())


def _with_replacements(
    target: TargetCost,
    devices: Mapping[str, Device],
    old: Assignment,
    processors: Mapping[str, str],
    prepared: Collection[str],
) -> Assignment | None:
    """Every lost stage on the machine that it makes the least slow, a prepared one first, and of
    these an idle one."""
    chosen = [(one.member if one.member in devices else None, one.layers) for one in old]
    for rank, (member, layers) in enumerate(chosen):
        if member is not None:
            continue
        used = Counter(name for name, _ in chosen if name is not None)
        options = []
        for name, device in devices.items():
            there = [span for other, span in chosen if other == name] + [layers]
            if sum(map(target.memory, there)) > device.memory or len(there) > PORTS:
                continue
            took = sum(target.seconds(span, device.speed) for span in there)
            options.append(((name not in prepared, used[name] > 0), took, name))
        if not options:
            return None
        state, least, _ = min(options)
        kind = processors.get(old[rank].member, "")
        like = [
            option
            for option in options
            if option[0] == state and option[1] <= AS_FAST * least
            if devices[option[2]].processor == kind
        ]
        chosen[rank] = (min(like or options)[2], layers)
    return _keeping_ports(old, [(name, span) for name, span in chosen if name is not None])


def _split_anew(
    target: TargetCost, devices: Mapping[str, Device], stages: int, sessions: int
) -> Assignment | None:
    """The best placement that can be cut into so many stages."""
    for count in range(min(stages, len(devices)), 0, -1):
        found = place(
            target, list(devices.values()), Network(), throughput_rate(sessions), Constraints(count)
        )
        if found is None:
            continue
        placed = [(stage.device.name, stage.layers) for stage in found.stages]
        while len(placed) < stages:
            cuts = [_cut(target, placed, i) for i in range(len(placed))]
            possible = [cut for cut in cuts if cut and fits(target, devices, _with_ports(cut))]
            if not possible:
                break
            placed = min(possible, key=lambda cut: max(map(_width, cut)))
        if len(placed) == stages:
            return _with_ports(placed)
    return None


def _width(one: tuple[str, Span]) -> int:
    return one[1][1] - one[1][0]


def _cut(
    target: TargetCost, placed: Sequence[tuple[str, Span]], i: int
) -> list[tuple[str, Span]] | None:
    """Stage ``i`` as two of the same machine, as even as can be; None where it cannot be cut."""
    name, (first, end) = placed[i]
    for at in sorted(range(first + 1, end), key=lambda at: abs(2 * at - first - end)):
        parts = ((first, at), (at, end))
        if target.refused.keys().isdisjoint(parts):
            return [*placed[:i], *((name, part) for part in parts), *placed[i + 1 :]]
    return None


def _stages(assignment: Assignment) -> Counter[str]:
    return Counter(one.member for one in assignment)


def _with_ports(placed: Sequence[tuple[str, Span]]) -> Assignment:
    taken: Counter[str] = Counter()
    found = []
    for name, span in placed:
        found.append(Assigned(name, taken[name], span))
        taken[name] += 1
    return tuple(found)


def _keeping_ports(old: Assignment, placed: Sequence[tuple[str, Span]]) -> Assignment:
    """Stages that stay have the port they had."""
    found: list[Assigned] = []
    taken = {(one.member, one.port) for one in old}
    for before, (name, span) in zip(old, placed, strict=True):
        port = before.port
        if name != before.member:
            port = next(n for n in range(2 * PORTS) if (name, n) not in taken)
            taken.add((name, port))
        found.append(Assigned(name, port, span))
    return tuple(found)
