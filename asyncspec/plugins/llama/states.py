"""Which of llama.cpp's sequences hold the recurrent states of a tree. Pure.

A recurrent layer (Mamba, a gated delta net, a short convolution) keeps one state for a sequence:
that of its last row, which cannot be cut back. So a sequence stands for one node, at which it ends,
and rows go on from a copy of it. The trunk's end always keeps a sequence; the others are snapshots,
at the ends of chains that were computed. A node between two snapshots is not ``cached``: rows below
it begin at the nearest snapshot above, and the rows between are computed again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from asyncspec.plugins.llama.branches import Memory, Node, Pool, SessionSequences


class States(SessionSequences):
    """Those that end at snapshots."""

    def __init__(self, memory: Memory, pool: Pool) -> None:
        super().__init__(memory, pool)
        # By sequence, the node that it ends at, None: the trunk's end; the oldest first.
        self._ends: dict[int, Node | None] = {}
        # Sequences of chains that are being computed, and where these will end.
        self._growing: dict[int, Node] = {}
        # Tokens of the prompt after which the state is kept, and, once it is computed, that and
        # what else a sequence of these holds.
        self.border = 0
        self._kept: Any = None

    @property
    def size(self) -> int:
        """Attention's cells that hold the session, each counted once."""
        if self.is_parked:
            return 0
        ends = [*self._ends.values(), *self._growing.values()]
        return self.trunk + len({node for end in ends for node in self.path(end)})

    @property
    def is_growing(self) -> bool:
        """Whether a chain is being computed."""
        return bool(self._growing)

    # --- Computing chains.

    def fork(self, start: Node | None, end: Node) -> int:
        """A sequence for a chain up to ``end`` that goes on from a cached node or, None, from the
        trunk's end. Needs a free one; ``settle`` or ``drop`` it."""
        sequence = self._pool.free.pop()
        length = self.trunk if start is None else start.position + 1
        if length:
            holder = next(s for s, node in self._ends.items() if node is start)
            self._memory.copy(holder, sequence, 0, length)
        self._growing[sequence] = end
        return sequence

    def take(self, start: Node, end: Node) -> int:
        """The same, with the sequence of the cached node itself, which is no snapshot any more."""
        start.cached = False
        del self._ends[start.sequence]
        self._growing[start.sequence] = end
        return start.sequence

    def settle(self, sequence: int) -> None:
        """A chain has been computed."""
        end = self._ends[sequence] = self._growing.pop(sequence)
        end.sequence, end.cached = sequence, True
        if end.position + 1 == self.border and self._kept is None:
            # The prompt has one path, so this node is of it.
            self._kept = self._memory.save(sequence)

    def drop(self, sequence: int) -> None:
        """What was computed in a sequence came to nothing."""
        del self._growing[sequence]
        self._memory.remove(sequence, 0)
        self._pool.free.append(sequence)

    # --- What the tree becomes.

    def advance(self, path: Sequence[Node]) -> None:
        """The trunk continues with these nodes, the last of which is cached. What is not below it
        is dead."""
        tip = path[-1]
        for sequence, end in [*self._ends.items()]:
            if end is None or tip not in self.path(end):
                self._release(sequence)
        self._ends[tip.sequence] = None
        self.trunk = tip.position + 1
        tip.cached, tip.parent = False, None

    def prune(self, alive: Collection[Node]) -> None:
        """Forget all other nodes."""
        for sequence, end in [*self._ends.items()]:
            if end is not None and end not in alive:
                self._release(sequence)

    def evict(self, needed: int, protected: Collection[Node] = ()) -> None:
        """Give back up to ``needed`` snapshots that are not ``protected``: first those above
        others, the oldest first."""
        ends = [end for end in self._ends.values() if end is not None]
        inner = {node for end in ends for node in self.path(end.parent)}
        for end in sorted(ends, key=lambda end: end not in inner):
            if needed <= 0:
                return
            if end not in protected:
                self._release(end.sequence)
                needed -= 1

    def park(self) -> None:
        """Move the trunk out of the cache, and give all sequences back."""
        holder = next((s for s, end in self._ends.items() if end is None), None)
        if holder is not None:
            self._saved = self._memory.save(holder)
        self._release_all()

    def unpark(self) -> None:
        """Move the trunk back. Needs a sequence."""
        sequence = self._pool.free.pop()
        self._memory.restore(sequence, self._saved)
        self._ends[sequence] = self._saved = None

    def keep(self, length: int) -> None:
        """See ``SessionSequences``."""
        self.border = length
        if length == self.trunk and self.is_parked:
            self._kept = self._saved

    def begin_like(self, session: States, length: int) -> None:
        """Begin, parked, with as much as is kept of the first ``length`` tokens of another session.
        Raises ``ValueError`` where that is not kept."""
        if length == session.border and session._kept is not None:
            self._saved, self.trunk = session._kept, length
        elif session.trunk <= length and not session._ends:
            self._saved, self.trunk = session._saved, session.trunk
        else:
            raise ValueError(f"the state after {length} tokens is not kept")

    def rewind(self, length: int) -> None:
        """Forget all nodes. Raises ``ValueError`` where the trunk would become shorter."""
        if length < self.trunk:
            raise ValueError(f"a recurrent state of {self.trunk} tokens, of {length} none")
        self.prune(())

    def trim(self, length: int) -> None:
        """Keep positions [0, length) of the trunk, outside the cache; nothing but the border where
        its state is of more."""
        if length < self.trunk:
            self._saved = None
            self._release_all()
            self.trunk = 0
        self.prune(())
        if not self.is_parked:
            self.park()

    def close(self) -> None:
        """Give everything back."""
        self._saved = self._kept = None
        self._release_all()

    def _release(self, sequence: int) -> None:
        if (end := self._ends.pop(sequence)) is not None:
            end.cached = False
        self._memory.remove(sequence, 0)
        self._pool.free.append(sequence)

    def _release_all(self) -> None:
        for sequence in [*self._ends]:
            self._release(sequence)

    def check(self, nodes: Collection[Node]) -> None:
        """Raise ``AssertionError`` where sequences and cached ``nodes`` differ."""
        ends = [end for end in self._ends.values() if end is not None]
        assert {node for node in nodes if node.cached} == set(ends)
        assert len(ends) == len(set(ends))
        assert not self._growing
        assert not self.trunk or self.is_parked or None in self._ends.values()
