"""Which of llama.cpp's sequences hold the paths of a tree. Pure.

A row of llama.cpp attends to what is in its sequence at earlier positions, so each leaf's path has
to be a sequence, and a row joins those of all leaves below it. There are few sequences: 256 in a
cache. When a pass lacks some, leaves that it does not need are evicted from the cache; a node knows
what it was computed from, and is computed again when a row below it comes.

Every sequence of a session holds its trunk, the committed path as far as it is in the cache, so a
new branch copies no more than what is below that. A session without a sequence is parked: its trunk
is kept outside the cache, and comes back with the next pass, or with a session that begins like it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol


class Memory(Protocol):
    """The cache. Positions are ranges [start, end)."""

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """What is in one sequence is also in another."""

    def remove(self, sequence: int, start: int) -> None:
        """From ``start`` on a sequence is empty; what is in no other is free."""

    def save(self, sequence: int) -> Any:
        """A copy of what is in a sequence."""

    def restore(self, sequence: int, saved: Any) -> None:
        """Fill an empty sequence."""


class Node:
    """A row of a session's tree. ``given``: its token, or its hidden state."""

    __slots__ = ("cached", "input", "parent", "position", "sequence")

    def __init__(self, parent: Node | None, position: int, input: Any) -> None:
        # None: the end of the trunk.
        self.parent = parent
        self.position = position
        self.input = input
        self.cached = False
        # One that holds it, while it is cached.
        self.sequence = -1


class Pool:
    """The unused sequences of a cache."""

    def __init__(self, count: int) -> None:
        self.free = list(range(count - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.free)


class SessionSequences(ABC):
    """The sequences of one session."""

    def __init__(self, memory: Memory, pool: Pool) -> None:
        self._memory, self._pool = memory, pool
        # Positions [0, trunk) are in all of them.
        self.trunk = 0
        # The trunk of a parked session.
        self._saved: Any = None
        # The session is over, and its trunk is kept for others to begin like.
        self.is_kept = False

    @property
    def is_parked(self) -> bool:
        """Whether the trunk is outside the cache."""
        return self._saved is not None

    def path(self, node: Node | None) -> Iterator[Node]:
        """A node and those above it, up to the trunk."""
        while node is not None and node.position >= self.trunk:
            yield node
            node = node.parent

    @property
    @abstractmethod
    def size(self) -> int:
        """Cells that hold the session, each counted once; shared ones count for every session."""

    @abstractmethod
    def unpark(self) -> None:
        """Move the trunk back. Needs a sequence."""

    def keep(self, length: int) -> None:  # noqa: B027
        """Keep what the first ``length`` tokens leave behind, for sessions that begin so. Nothing
        where these can share any part of the trunk."""

    @abstractmethod
    def advance(self, path: Sequence[Node]) -> None:
        """The trunk continues with these nodes, the last of which is cached. What is not below it
        is dead."""

    @abstractmethod
    def prune(self, alive: Collection[Node]) -> None:
        """Forget all other nodes. With a node, those above it are alive."""

    @abstractmethod
    def rewind(self, length: int) -> None:
        """Forget all nodes, and the trunk from ``length`` on."""

    @abstractmethod
    def trim(self, length: int) -> None:
        """Keep positions [0, length) of the trunk."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""

    @abstractmethod
    def check(self, nodes: Collection[Node]) -> None:
        """Raise ``AssertionError`` where sequences and cached ``nodes`` differ."""


class Branches(SessionSequences):
    """Those whose leaves are the tree's."""

    def __init__(self, memory: Memory, pool: Pool) -> None:
        super().__init__(memory, pool)
        # By sequence, the last node of the path it holds; None: nothing but the trunk.
        self._leaves: dict[int, Node | None] = {}
        # The one that this one began like, if most of it is shared.
        self.parent: Branches | None = None

    @property
    def size(self) -> int:
        if self.is_parked:
            return 0
        return self.trunk + len({n for leaf in self._leaves.values() for n in self.path(leaf)})

    def begin_like(self, session: Branches, holder: int, length: int) -> None:
        """Share the first positions of another session's sequence ``holder``. Needs a sequence."""
        sequence = self._pool.free.pop()
        self._memory.copy(holder, sequence, 0, length)
        self._leaves[sequence] = None
        self.trunk = length
        self.parent = session if 2 * length >= session.trunk else None

    def read(self, start: int, end: int) -> Any:
        """Copies of positions [start, end) of the trunk. Needs a sequence."""
        sequence = self._pool.free.pop()
        self._memory.copy(self.holder(None), sequence, start, end)
        _, states = self._memory.save(sequence)
        self._memory.remove(sequence, 0)
        self._pool.free.append(sequence)
        return states

    def write(self, start: int, end: int, states: Any) -> None:
        """Continue the trunk by such copies. Needs a sequence."""
        sequence = self._pool.free.pop()
        self._memory.restore(sequence, (end - start, states))
        if not self._leaves:
            self._leaves[sequence] = None
        else:
            self._memory.copy(sequence, self.holder(None), start, end)
            self._memory.remove(sequence, 0)
            self._pool.free.append(sequence)
        self.trunk = end

    def holder(self, node: Node | None) -> int:
        """A sequence with the path to a node, or to the end of the trunk; -1: there is none."""
        return next(iter(self._leaves), -1) if node is None else node.sequence

    def advance(self, path: Sequence[Node]) -> None:
        """The trunk continues with these nodes, which are cached. What is not below their last one
        is dead."""
        tip, start = path[-1], self.trunk
        end = tip.position + 1
        for sequence, leaf in self._leaves.items():
            last = next((n for n in self.path(leaf) if n.position < end), None)
            if last is tip:
                if leaf is tip:
                    self._leaves[sequence] = None
                continue
            if leaf is not None:
                self._memory.remove(sequence, start)
                self._leaves[sequence] = None
            self._memory.copy(tip.sequence, sequence, start, end)
        self.trunk = end
        tip.parent = None

    def prune(self, alive: Collection[Node]) -> None:
        """Forget all other nodes. With a node, those above it are alive."""
        for sequence, leaf in self._leaves.items():
            last = next((node for node in self.path(leaf) if node in alive), None)
            if last is not leaf:
                self._cut(sequence, last)
        self._merge()

    def _hold(self) -> None:
        for sequence, leaf in self._leaves.items():
            for node in self.path(leaf):
                node.sequence = sequence

    def missing(self, rows: Sequence[Node]) -> int:
        """Sequences that ``attach`` would take from the pool."""
        among = set(rows)
        anchors = [self._anchor(leaf, among) for leaf in _leaves_of(rows)]
        spare = sum(leaf is None for leaf in self._leaves.values())
        ends = {leaf for leaf in self._leaves.values() if leaf is not None}
        return max(0, len(anchors) - len(ends.intersection(anchors)) - spare)

    def attach(self, rows: Sequence[Node]) -> list[list[int]]:
        """The sequences of new rows of a pass, parents first, whose other ancestors are cached."""
        ends = {leaf: sequence for sequence, leaf in self._leaves.items() if leaf is not None}
        spare = [sequence for sequence, leaf in self._leaves.items() if leaf is None]
        taken: list[tuple[int, Node]] = []
        among = set(rows)
        for leaf in _leaves_of(rows):
            anchor = self._anchor(leaf, among)
            sequence = -1 if anchor is None else ends.pop(anchor, -1)
            if sequence < 0:
                fresh = not spare
                holder = self.holder(anchor)
                sequence = self._pool.free.pop() if fresh else spare.pop()
                end = self.trunk if anchor is None else anchor.position + 1
                start = 0 if fresh else self.trunk
                if start < end:
                    self._memory.copy(holder, sequence, start, end)
                self._leaves[sequence] = anchor
            taken.append((sequence, leaf))
        members: dict[Node, list[int]] = {row: [] for row in rows}
        for sequence, leaf in taken:
            self._leaves[sequence] = leaf
            for node in self.path(leaf):
                if node not in members:
                    break
                members[node].append(sequence)
                node.sequence = sequence
                node.cached = True
        return [members[row] for row in rows]

    def _anchor(self, leaf: Node, rows: Collection[Node]) -> Node | None:
        """Where the branch of a new leaf begins."""
        return next((node for node in self.path(leaf) if node not in rows), None)

    def detach(self, rows: Collection[Node]) -> None:
        """Rows whose pass came to nothing are not in the cache; they stay in the tree."""
        for sequence, leaf in self._leaves.items():
            if leaf in rows:
                self._cut(sequence, self._anchor(leaf, rows))  # type: ignore[arg-type]
        for node in rows:
            node.cached = False
        self._merge()

    def _cut(self, sequence: int, last: Node | None) -> None:
        self._memory.remove(sequence, self.trunk if last is None else last.position + 1)
        self._leaves[sequence] = last

    def _merge(self) -> None:
        """No leaf is above another, and none twice."""
        kept: set[Node] = set()
        order = [(s, leaf) for s, leaf in self._leaves.items() if leaf is not None]
        for sequence, leaf in sorted(order, key=lambda item: -item[1].position):
            if leaf in kept:
                self._cut(sequence, None)
            else:
                kept.update(self.path(leaf))
        self._hold()

    def evict(self, needed: int, protected: Collection[Node] = (), *, spares: bool = True) -> None:
        """Give back up to ``needed`` sequences: ``spares``, which hold nothing but the trunk, and
        leaves that are not ``protected``, nor above such. One always stays."""
        safe = {above for node in protected for above in self.path(node)}
        for sequence, leaf in sorted(self._leaves.items(), key=lambda item: item[1] is not None):
            if needed <= 0 or len(self._leaves) == 1:
                break
            if leaf is None and not spares:
                continue
            others = {
                node
                for number, end in self._leaves.items()
                if number != sequence
                for node in self.path(end)
            }
            lost = [node for node in self.path(leaf) if node not in others]
            if safe.intersection(lost):
                continue
            for node in lost:
                node.cached = False
            self._memory.remove(sequence, 0)
            del self._leaves[sequence]
            self._pool.free.append(sequence)
            needed -= 1
        self._hold()

    def park(self) -> None:
        """Move the trunk out of the cache, give all sequences back, and evict all nodes."""
        for sequence, leaf in self._leaves.items():
            for node in self.path(leaf):
                node.cached = False
            self._memory.remove(sequence, self.trunk)
        if self.trunk and self._leaves:
            self._saved = self._memory.save(next(iter(self._leaves)))
        self._release()

    def unpark(self) -> None:
        """Move the trunk back. Needs a sequence."""
        sequence = self._pool.free.pop()
        self._memory.restore(sequence, self._saved)
        self._memory.remove(sequence, self.trunk)  # it was longer
        self._leaves[sequence] = self._saved = None

    def rewind(self, length: int) -> None:
        """Forget all nodes, and the trunk from ``length`` on."""
        for sequence in self._leaves:
            self._memory.remove(sequence, length)
            self._leaves[sequence] = None
        self.trunk = length

    def trim(self, length: int) -> None:
        """Keep positions [0, length) of the trunk, in one sequence."""
        self.parent = None  # or chats would hold all their turns
        self.rewind(length)
        self.evict(len(self._leaves))

    def close(self) -> None:
        """Give everything back."""
        self._saved = None
        self._release()

    def _release(self) -> None:
        for sequence in self._leaves:
            self._memory.remove(sequence, 0)
        self._pool.free += self._leaves
        self._leaves.clear()

    def check(self, nodes: Collection[Node]) -> None:
        """Raise ``AssertionError`` where sequences and cached ``nodes`` differ."""
        cached = {node for node in nodes if node.cached}
        held = [set(self.path(leaf)) for leaf in self._leaves.values()]
        assert set().union(*held) == cached
        assert all(node.sequence in self._leaves for node in cached)
        ends = [leaf for leaf in self._leaves.values() if leaf is not None]
        assert len(ends) == len(set(ends))


def _leaves_of(rows: Sequence[Node]) -> list[Node]:
    above = {row.parent for row in rows}
    return [row for row in rows if row not in above]
