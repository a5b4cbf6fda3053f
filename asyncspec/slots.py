"""Who sits where in a tree cache: one slot per live node, the committed path first.

Slots ``[0, committed)`` hold the committed path and there slot == position; the tail holds live
nodes below the tip, every parent before its children. Committing moves nothing; pruning moves at
most the tail. Attention only needs to know which tail slots a row may see, so no mask is stored:
it is derived from the parents when a pass is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from asyncspec.jobs import Row
from asyncspec_protocol.ids import NO_PARENT, NodeId

Holds = Callable[[NodeId], bool]


class Seat(Struct, frozen=True):
    """What a cache must know of a tail node to place its children."""

    parent: NodeId
    position: int


class Slots(Struct, frozen=True):
    """The table of one session's cache. ``tail[i]`` sits in slot ``committed + i``."""

    committed: int = 0
    # The last node of the committed path that is in this cache.
    tip: NodeId = NO_PARENT
    tail: tuple[NodeId, ...] = ()
    seats: dict[NodeId, Seat] = {}

    @property
    def used(self) -> int:
        """Number of slots in use."""
        return self.committed + len(self.tail)


def place(
    slots: Slots, ids: Sequence[NodeId], parents: Sequence[NodeId], committed: Holds
) -> tuple[Slots, tuple[Row, ...]]:
    """Give slots to new nodes, in order, and plan their rows for ``Forward``.

    Visible slots are counted from ``slots.committed`` as it was before this call. Raises
    ``ValueError`` for a node whose parent is neither the tip, nor in the tail, nor placed before.
    """
    seats = dict(slots.seats)
    slot_of = {node: slots.committed + i for i, node in enumerate(slots.tail)}
    lines: dict[NodeId, tuple[int, ...]] = {}
    rows: list[Row] = []
    for node, parent in zip(ids, parents, strict=True):
        if parent == slots.tip:
            position = slots.committed
            line: tuple[int, ...] = ()
        elif parent in slot_of:
            position = seats[parent].position + 1
            line = lines.get(parent) or _line(parent, seats, slot_of)
        else:
            raise ValueError(f"node {node} has no parent {parent} in the cache")
        if node in slot_of:
            raise ValueError(f"node {node} is in the cache already")
        slot = slots.used + len(rows)
        seats[node] = Seat(parent=parent, position=position)
        slot_of[node] = slot
        lines[node] = (*line, slot)
        rows.append(Row(slot=slot, position=position, visible=lines[node]))
    grown = Slots(committed=slots.committed, tip=slots.tip, tail=(*slots.tail, *ids), seats=seats)
    return _commit(grown, committed), tuple(rows)


def settle(slots: Slots, committed: Holds, alive: Holds) -> tuple[Slots, tuple[int, ...] | None]:
    """Free the slots of the dead and move the frontier of the committed path on.

    Returns the new table and the slots that stay, ascending, for ``Compact(start=committed)`` with
    the *old* ``committed``; None where nothing moves or is freed.
    """
    stay = [i for i, node in enumerate(slots.tail) if alive(node)]
    if len(stay) == len(slots.tail):
        return _commit(slots, committed), None
    tail = tuple(slots.tail[i] for i in stay)
    kept = Slots(
        committed=slots.committed,
        tip=slots.tip,
        tail=tail,
        seats={node: slots.seats[node] for node in tail},
    )
    return _commit(kept, committed), tuple(slots.committed + i for i in stay)


def _commit(slots: Slots, committed: Holds) -> Slots:
    """Count leading tail nodes that continue the committed path as committed."""
    tip, count = slots.tip, 0
    for node in slots.tail:
        if slots.seats[node].parent != tip or not committed(node):
            break
        tip, count = node, count + 1
    if not count:
        return slots
    tail = slots.tail[count:]
    return Slots(
        committed=slots.committed + count,
        tip=tip,
        tail=tail,
        seats={node: slots.seats[node] for node in tail},
    )


def _line(node: NodeId, seats: dict[NodeId, Seat], slot_of: dict[NodeId, int]) -> tuple[int, ...]:
    """Slots of a tail node and its ancestors in the tail, ascending."""
    line: list[int] = []
    while node in slot_of:
        line.append(slot_of[node])
        node = seats[node].parent
    return tuple(reversed(line))
