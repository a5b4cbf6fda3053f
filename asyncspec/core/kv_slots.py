"""Slot assignment of a tree KV cache: one slot per live node, the committed path first.

Slots ``[0, committed)`` hold the committed path, and there slot == position. The slots from
``committed`` on are the speculative region: live nodes below the tip, every parent before its
children. Committing moves nothing; pruning moves at most the speculative region. No attention mask
is stored: the slots that a row sees are derived from the parents when a pass is planned.

Cost: a prune looks at each node of the speculative region once. A pass costs its rows and, where
slots have moved since the last one, their ancestors in that region. The committed path costs
nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import compress, count, islice

from msgspec import Struct

from asyncspec.core.jobs import Row
from asyncspec_protocol.ids import NO_PARENT, NodeId

BLOCK = 64
"""Slots of a block: unit of growth, and of positions that exact attention sums at once."""


def whole_blocks(slots: int) -> int:
    """The least number of slots that is a multiple of ``BLOCK`` and no less than ``slots``."""
    return -(-slots // BLOCK) * BLOCK


NodePredicate = Callable[[NodeId], bool]
AncestorSlots = tuple[int, ...]


class CacheSlot(Struct, frozen=True, gc=False):
    """A speculative node's slot: its parent, and the slots that its children see."""

    parent: NodeId
    # Slots of its ancestors and its own, ascending; the first ones may have been committed since.
    # Empty where slots have moved: recomputed when a child needs it.
    ancestor_slots: AncestorSlots = ()


class SlotTable(Struct, frozen=True):
    """The slots of one session's cache."""

    committed: int = 0
    # The last node of the committed path that is in this cache.
    tip: NodeId = NO_PARENT
    # The speculative region in the order of its slots, from slot ``committed`` on.
    speculative: dict[NodeId, CacheSlot] = {}

    @property
    def speculative_nodes(self) -> tuple[NodeId, ...]:
        """The ``i``-th node is in slot ``committed + i``."""
        return tuple(self.speculative)

    @property
    def used(self) -> int:
        """Number of slots in use."""
        return self.committed + len(self.speculative)


def allocate(
    slots: SlotTable, ids: Sequence[NodeId], parents: Sequence[NodeId], committed: NodePredicate
) -> tuple[SlotTable, tuple[Row, ...]]:
    """Give slots to new nodes, in order, and plan their rows for ``Forward``; visible slots are
    counted from ``slots.committed`` as it was. Raises ``ValueError`` for a node that is in the
    cache, or whose parent is neither the tip, nor speculative, nor an earlier one of ``ids``."""
    start, tip, slot = slots.committed, slots.tip, slots.used
    speculative = slots.speculative.copy()
    rows: list[Row] = []
    slot_of: dict[NodeId, int] = {}
    for node, parent in zip(ids, parents, strict=True):
        above = speculative.get(parent)
        if above is not None:
            visible = above.ancestor_slots or _recomputed(slots, parent, speculative, slot_of)
            if visible[0] < start:
                visible = visible[bisect_left(visible, start) :]
            visible = visible + (slot,)  # noqa: RUF005 (twice as fast)
        elif parent == tip:
            visible = (slot,)
        else:
            raise ValueError(f"node {node} has no parent {parent} in the cache")
        speculative[node] = CacheSlot(parent, visible)
        rows.append(Row(slot, start + len(visible) - 1, visible))
        slot += 1
    if start + len(speculative) != slot:
        raise ValueError("a node is in the cache already")
    return _commit(SlotTable(start, tip, speculative), committed), tuple(rows)


def reclaim(
    slots: SlotTable, committed: NodePredicate, alive: NodePredicate
) -> tuple[SlotTable, tuple[int, ...] | None]:
    """Free the slots of dead nodes and extend the committed path. Returns the new table and the
    slots that stay, ascending, for ``Compact(start=committed)`` with the *old* ``committed``; None
    where no slot is freed."""
    old = slots.speculative
    stays = list(map(alive, old))
    if all(stays):
        return _commit(slots, committed), None
    kept = {
        n: CacheSlot(s.parent) if s.ancestor_slots else s for n, s in compress(old.items(), stays)
    }
    stay = tuple(compress(count(slots.committed), stays))
    return _commit(SlotTable(slots.committed, slots.tip, kept), committed), stay


def orphan(slots: SlotTable) -> NodeId | None:
    """A speculative node whose parent is neither the tip nor speculative; None: every node has
    one."""
    parents = {entry.parent for entry in slots.speculative.values()}.difference(slots.speculative)
    if not parents or parents == {slots.tip}:
        return None
    parents.discard(slots.tip)
    return next(node for node, entry in slots.speculative.items() if entry.parent in parents)


def _recomputed(
    slots: SlotTable, node: NodeId, speculative: dict[NodeId, CacheSlot], slot_of: dict[NodeId, int]
) -> AncestorSlots:
    """The ancestor slots of a node. Those of its ancestors that are missing are entered in
    ``speculative`` as well, so that each is computed once. ``slot_of`` is filled on first use."""
    if not slot_of:
        slot_of.update(zip(slots.speculative, count(slots.committed), strict=False))
    missing: list[NodeId] = []
    while (entry := speculative.get(node)) is not None and not entry.ancestor_slots:
        missing.append(node)
        node = entry.parent
    visible = () if entry is None else entry.ancestor_slots
    for below in reversed(missing):
        visible = visible + (slot_of[below],)  # noqa: RUF005
        speculative[below] = CacheSlot(speculative[below].parent, visible)
    return visible


def _commit(slots: SlotTable, committed: NodePredicate) -> SlotTable:
    """Count leading speculative nodes that continue the committed path as committed."""
    tip, passed = slots.tip, 0
    for node, entry in slots.speculative.items():
        if entry.parent != tip or not committed(node):
            break
        tip, passed = node, passed + 1
    if not passed:
        return slots
    left = dict(islice(slots.speculative.items(), passed, None))
    return SlotTable(slots.committed + passed, tip, left)
