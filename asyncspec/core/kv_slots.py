"""Who sits where in a tree cache: one slot per live node, the committed path first.

Slots ``[0, committed)`` hold the committed path and there slot == position; the tail holds live
nodes below the tip, every parent before its children. Committing moves nothing; pruning moves at
most the tail. Attention only needs to know which tail slots a row may see, so no mask is stored:
it is derived from the parents when a pass is planned.

Law of this file: the committed path costs nothing. A prune costs a look at each node of the tail; a
pass its rows and, where slots have moved since the last one, their ancestors in the tail.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import compress, count, islice

from msgspec import Struct

from asyncspec.core.jobs import Row
from asyncspec_protocol.ids import NO_PARENT, NodeId

Holds = Callable[[NodeId], bool]
Line = tuple[int, ...]


class Seat(Struct, frozen=True, gc=False):
    """Where a tail node sits, and what its children see."""

    parent: NodeId
    # Slots of its ancestors and its own, ascending; the first ones may have been committed since.
    # Empty where slots have moved: it is made again when a child needs it.
    line: Line = ()


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
    start, tip, seats, slot = slots.committed, slots.tip, slots.seats.copy(), slots.used
    rows: list[Row] = []
    slot_of: dict[NodeId, int] = {}
    for node, parent in zip(ids, parents, strict=True):
        above = seats.get(parent)
        if above is not None:
            line = above.line or _line(slots, parent, seats, slot_of)
            if line[0] < start:
                line = line[bisect_left(line, start) :]
            line = line + (slot,)  # noqa: RUF005 (twice as fast)
        elif parent == tip:
            line = (slot,)
        else:
            raise ValueError(f"node {node} has no parent {parent} in the cache")
        seats[node] = Seat(parent, line)
        rows.append(Row(slot, start + len(line) - 1, line))
        slot += 1
    if start + len(seats) != slot:
        raise ValueError("a node is in the cache already")
    return _commit(Slots(start, tip, seats), committed), tuple(rows)


def settle(slots: Slots, committed: Holds, alive: Holds) -> tuple[Slots, tuple[int, ...] | None]:
    """Free the slots of the dead and move the frontier of the committed path on.

    Returns the new table and the slots that stay, ascending, for ``Compact(start=committed)`` with
    the *old* ``committed``; None where nothing moves or is freed.
    """
    old = slots.seats
    stays = list(map(alive, old))
    if all(stays):
        return _commit(slots, committed), None
    seats = {n: Seat(s.parent) if s.line else s for n, s in compress(old.items(), stays)}
    stay = tuple(compress(count(slots.committed), stays))
    return _commit(Slots(slots.committed, slots.tip, seats), committed), stay


def _line(
    slots: Slots, node: NodeId, seats: dict[NodeId, Seat], slot_of: dict[NodeId, int]
) -> Line:
    """Make the line of a tail node again, and those above it that are missing: each goes to
    ``seats``, so that no line is made twice. ``slot_of`` is filled when it is needed first."""
    if not slot_of:
        slot_of.update(zip(slots.seats, count(slots.committed), strict=False))
    missing: list[NodeId] = []
    while (seat := seats.get(node)) is not None and not seat.line:
        missing.append(node)
        node = seat.parent
    line = () if seat is None else seat.line
    for below in reversed(missing):
        line = line + (slot_of[below],)  # noqa: RUF005
        seats[below] = Seat(seats[below].parent, line)
    return line


def _commit(slots: Slots, committed: Holds) -> Slots:
    """Count leading tail nodes that continue the committed path as committed."""
    tip, passed = slots.tip, 0
    for node, seat in slots.seats.items():
        if seat.parent != tip or not committed(node):
            break
        tip, passed = node, passed + 1
    if not passed:
        return slots
    left = dict(islice(slots.seats.items(), passed, None))
    return Slots(slots.committed + passed, tip, left)
