"""Who sits where in a tree cache: one slot per live node, the committed path first.

Slots ``[0, committed)`` hold the committed path and there slot == position; the tail holds live
nodes below the tip, every parent before its children. Committing moves nothing; pruning moves at
most the tail. Attention only needs to know which tail slots a row may see, so no mask is stored:
it is derived from the parents when a pass is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from msgspec import Struct

from asyncspec.jobs import Row
from asyncspec_protocol.ids import NO_PARENT, NodeId

Holds = Callable[[NodeId], bool]


class Seat(Struct, frozen=True, gc=False):
    """Where a tail node sits, and what its children see."""

    parent: NodeId
    position: int
    # Slots of its ancestors and its own, ascending; the first ones may have been committed since.
    line: tuple[int, ...]


class Slots(Struct, frozen=True):
    """The table of one session's cache."""

    committed: int = 0
    # The last node of the committed path that is in this cache.
    tip: NodeId = NO_PARENT
    # The tail in the order of its slots, from slot ``committed`` on.
    seats: dict[NodeId, Seat] = {}

    @property
    def tail(self) -> tuple[NodeId, ...]:
        """``tail[i]`` sits in slot ``committed + i``."""
        return tuple(self.seats)

    @property
    def used(self) -> int:
        """Number of slots in use."""
        return self.committed + len(self.seats)


def place(
    slots: Slots, ids: Sequence[NodeId], parents: Sequence[NodeId], committed: Holds
) -> tuple[Slots, tuple[Row, ...]]:
    """Give slots to new nodes, in order, and plan their rows for ``Forward``.

    Visible slots are counted from ``slots.committed`` as it was before this call. Raises
    ``ValueError`` for a node whose parent is neither the tip, nor in the tail, nor placed before.
    """
    start, tip, seats = slots.committed, slots.tip, slots.seats.copy()
    rows: list[Row] = []
    for slot, (node, parent) in enumerate(zip(ids, parents, strict=True), slots.used):
        above = seats.get(parent)
        if above is not None:
            position = above.position + 1
            line = above.line[start - position :] + (slot,)  # noqa: RUF005 (twice as fast)
        elif parent == tip:
            position, line = start, (slot,)
        else:
            raise ValueError(f"node {node} has no parent {parent} in the cache")
        if node in seats:
            raise ValueError(f"node {node} is in the cache already")
        seats[node] = Seat(parent, position, line)
        rows.append(Row(slot, position, line))
    return _commit(Slots(start, tip, seats), committed), tuple(rows)


def settle(slots: Slots, committed: Holds, alive: Holds) -> tuple[Slots, tuple[int, ...] | None]:
    """Free the slots of the dead and move the frontier of the committed path on.

    Returns the new table and the slots that stay, ascending, for ``Compact(start=committed)`` with
    the *old* ``committed``; None where nothing moves or is freed.
    """
    old = slots.seats
    left = list(filter(alive, old))
    if len(left) == len(old):
        return _commit(slots, committed), None
    seats: dict[NodeId, Seat] = {}
    stay: list[int] = []
    for slot, node in enumerate(left, slots.committed):
        seat = old[node]
        stay.append(seat.line[-1])
        above = seats.get(seat.parent)
        line = (slot,) if above is None else above.line + (slot,)  # noqa: RUF005
        seats[node] = Seat(seat.parent, seat.position, line)
    return _commit(Slots(slots.committed, slots.tip, seats), committed), tuple(stay)


def _commit(slots: Slots, committed: Holds) -> Slots:
    """Count leading tail nodes that continue the committed path as committed."""
    tip, count = slots.tip, 0
    for node, seat in slots.seats.items():
        if seat.parent != tip or not committed(node):
            break
        tip, count = node, count + 1
    if not count:
        return slots
    left = dict(islice(slots.seats.items(), count, None))
    return Slots(slots.committed + count, tip, left)
