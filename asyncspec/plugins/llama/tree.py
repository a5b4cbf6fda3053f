"""A session's tree as machines know it, slot by slot, over the nodes of an engine's cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncspec.core.errors import ClusterError
from asyncspec.core.jobs import Row
from asyncspec.plugins.llama.branches import Node
from asyncspec.plugins.llama.cache_engine import CacheEngine
from asyncspec.plugins.llama.states import States


class TreeCache:
    """The slots of one session (``asyncspec.core.kv_slots``)."""

    def __init__(self, engine: CacheEngine[Any]) -> None:
        self._engine = engine
        # ``SessionSequences`` of the engine's kind.
        self.branches: Any = engine.session()
        # From slot ``branches.trunk`` on; None: a slot that is free.
        self._nodes: list[Node | None] = []

    def copy_prefix(self, source: TreeCache, length: int) -> None:
        """Begin with the first slots of another session, which are its committed path. Raises
        ``ValueError`` where there are states and that after these slots is not kept."""
        if isinstance(self.branches, States):
            self.branches.begin_like(source.branches, length)
            again = source.nodes(self.branches.trunk, length)
        else:
            again = self._share(source, length)
        for node in again:
            above = self._nodes[-1] if self._nodes else None
            self._nodes.append(Node(above, node.position, node.input))

    def _share(self, source: TreeCache, length: int) -> list[Node]:
        """Share what is in the cache; the nodes of the other slots, to be computed again."""
        self._engine.reserve(source.branches)
        nodes = source.nodes(source.branches.trunk, length)
        cached = [node for node in nodes if node.cached]
        shared = min(length, source.branches.trunk) + len(cached)
        holder = source.branches.holder(cached[-1] if cached else None)
        if holder >= 0:
            self.branches.begin_like(source.branches, holder, shared)
        return nodes[len(cached) :]

    def keep_state(self, slots: int) -> None:
        """Keep the state after so many slots, once it is computed, for sessions that begin so;
        nothing without states."""
        self.branches.keep(slots)

    def nodes(self, start: int, end: int) -> list[Node]:
        """Those of slots [start, end)."""
        trunk = self.branches.trunk
        nodes = [node for node in self._nodes[max(0, start - trunk) : max(0, end - trunk)] if node]
        if len(nodes) != max(0, end - max(start, trunk)):
            raise ValueError(f"slots up to {end} are not all taken")
        return nodes

    def commit(self, committed: int) -> None:
        """Slots [0, committed) are the committed path."""
        path = self.nodes(self.branches.trunk, committed)
        # What is above a cached node is in its sequence.
        held = next((i for i in range(len(path), 0, -1) if path[i - 1].cached), 0)
        if held:
            self.branches.advance(path[:held])
            del self._nodes[:held]

    def grow(self, committed: int, rows: Sequence[Row], inputs: Sequence[Any]) -> list[Node]:
        """The nodes of new rows. ``inputs``: by row, its token or its hidden state."""
        self.commit(committed)
        first, end = min(row.slot for row in rows), self.branches.trunk + len(self._nodes)
        if first < end:  # they are computed anew
            self.compact(first, ())
        if first < self.branches.trunk:
            self.branches.rewind(first)
        new = []
        for row, item in zip(rows, inputs, strict=True):
            above = row.visible[-2] if len(row.visible) > 1 else row.position - 1
            place = row.slot - self.branches.trunk
            if above < self.branches.trunk:
                parent = None
            else:
                (parent,) = self.nodes(above, above + 1)
            node = Node(parent, row.position, item)
            self._nodes += [None] * (place + 1 - len(self._nodes))
            self._nodes[place] = node
            new.append(node)
        return new

    def compact(self, start: int, keep: Sequence[int]) -> None:
        trunk = self.branches.trunk
        self._nodes[max(0, start - trunk) :] = [self._nodes[slot - trunk] for slot in keep]
        self.branches.prune({node for node in self._nodes if node is not None and node.cached})

    def trim(self, slots: int) -> None:
        self.branches.is_kept = True
        self.commit(max(slots, self.branches.trunk))
        self._nodes = self._nodes[: max(0, slots - self.branches.trunk)]
        self.branches.trim(min(slots, self.branches.trunk))

    def read_slots(self, start: int, end: int) -> list[npt.NDArray[np.uint8]] | None:
        """As llama.cpp saves them; None where slots are to be computed again."""
        branches = self.branches
        self._engine.unpark(branches)
        self.commit(max(end, branches.trunk))
        if end > branches.trunk:
            return None
        self._engine.reserve(branches)
        return [*branches.read(start, end)]

    def write_slots(self, start: int, end: int, buffers: Sequence[memoryview]) -> bool:
        """Put them into the cache; fails where llama.cpp does not take them."""
        self.branches.is_kept = True
        self._engine.reserve(self.branches)
        states = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        try:
            self.branches.write(start, end, states)
        except ClusterError:
            return False
        return True

    def close(self) -> None:
        """Forget the session."""
        self._engine.close(self.branches)

    def check(self, committed: int) -> None:
        """Raise ``AssertionError`` where nodes and sequences contradict each other."""
        self.branches.check([node for node in self._nodes if node is not None])
