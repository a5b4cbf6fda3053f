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
from collections.abc import Callable, Mapping, Sequence
from itertools import compress, count, islice

from msgspec import Struct

from asyncspec.jobs import Row
from asyncspec_protocol.ids import NO_PARENT, NodeId

Holds = Callable[[NodeId], bool]
Line = tuple[int, ...]
"""Slots of a node's ancestors and its own, ascending. The first ones may have been committed."""


class Slots(Struct, frozen=True):
    """The table of one session's cache."""

    committed: int = 0
    # The last node of the committed path that is in this cache.
    tip: NodeId = NO_PARENT
    # Parents of the tail's nodes, in the order of its slots, from slot ``committed`` on.
    parents: dict[NodeId, NodeId] = {}
    # Lines of tail nodes, as far as they are known since a slot has last moved.
    lines: dict[NodeId, Line] = {}

    @property
    def tail(self) -> tuple[NodeId, ...]:
        """``tail[i]`` sits in slot ``committed + i``."""
        return tuple(self.parents)

    @property
    def used(self) -> int:
        """Number of slots in use."""
        return self.committed + len(self.parents)


def place(
    slots: Slots, ids: Sequence[NodeId], parents: Sequence[NodeId], committed: Holds
) -> tuple[Slots, tuple[Row, ...]]:
    """Give slots to new nodes, in order, and plan their rows for ``Forward``.

    Visible slots are counted from ``slots.committed`` as it was before this call. Raises
    ``ValueError`` for a node whose parent is neither the tip, nor in the tail, nor placed before.
    """
    start, lines = slots.committed, _lines(slots, parents)
    rows: list[Row] = []
    for slot, node, parent in zip(count(slots.used), ids, parents, strict=False):
        above = lines.get(parent)
        if above is None:
            raise ValueError(f"node {node} has no parent {parent} in the cache")
        lines[node] = line = above + (slot,)  # noqa: RUF005 (twice as fast)
        rows.append(Row(slot, start + len(above), line))
    held = slots.parents | dict(zip(ids, parents, strict=True))
    if len(held) != len(slots.parents) + len(ids):
        raise ValueError("a node is in the cache already")
    return _commit(Slots(start, slots.tip, held, lines), committed), tuple(rows)


def settle(slots: Slots, committed: Holds, alive: Holds) -> tuple[Slots, tuple[int, ...] | None]:
    """Free the slots of the dead and move the frontier of the committed path on.

    Returns the new table and the slots that stay, ascending, for ``Compact(start=committed)`` with
    the *old* ``committed``; None where nothing moves or is freed.
    """
    parents = slots.parents
    stays = list(map(alive, parents))
    if all(stays):
        return _commit(slots, committed), None
    left = dict(compress(parents.items(), stays))
    stay = tuple(compress(count(slots.committed), stays))
    return _commit(Slots(slots.committed, slots.tip, left), committed), stay


def _lines(slots: Slots, wanted: Sequence[NodeId]) -> dict[NodeId, Line]:
    """The known lines, that of the tip, and those of ``wanted`` nodes that are in the tail, which
    start at slot ``committed``.

    A node whose line has a gap, because a confused draft node has kept it without its parent,
    stands below the tip.
    """
    start, tip, parents = slots.committed, slots.tip, slots.parents
    lines, slot_of = slots.lines | {tip: ()}, dict[NodeId, int]()
    for node in parents.keys() & set(wanted):
        missing: list[NodeId] = []
        while (line := lines.get(node)) is None:
            missing.append(node)
            node = parents.get(node, tip)
        if line and line[0] < start:
            line = lines[node] = line[bisect_left(line, start) :]
        if missing and not slot_of:
            slot_of = dict(zip(parents, count(start), strict=False))
        for below in reversed(missing):
            lines[below] = line = line + (slot_of[below],)  # noqa: RUF005
    return lines


def _commit(slots: Slots, committed: Holds) -> Slots:
    """Count leading tail nodes that continue the committed path as committed."""
    tip, passed = slots.tip, 0
    for node, parent in slots.parents.items():
        if parent != tip or not committed(node):
            break
        tip, passed = node, passed + 1
    if not passed:
        return slots
    left = dict(islice(slots.parents.items(), passed, None))
    lines = {node: line for node, line in slots.lines.items() if node in left}
    return Slots(slots.committed + passed, tip, left, lines)
