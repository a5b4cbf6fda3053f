"""The nodes that a draft model has computed for a session: their keys and values are in its cache,
and their most likely successors are remembered.

When the target confirms a path through computed nodes, the tree below its end stays; what the path
leaves behind is forgotten. Node ids here are the source's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from typing import Generic, TypeVar

from asyncspec.core.jobs import Row
from asyncspec.core.kv_slots import SlotTable, allocate, reclaim
from asyncspec.core.tree import TIP
from asyncspec.source.expand import NO_PROPOSAL, Grower, Proposal
from asyncspec_protocol.ids import NO_PARENT, NodeId

Wanted = Sequence[tuple[NodeId, int]]
"""Nodes to compute: a computed parent and a token each."""


class Trie:
    """The computed nodes of one session and where they sit in the cache."""

    def __init__(self) -> None:
        self.slots = SlotTable()
        self._ids = count()
        self._children: dict[tuple[NodeId, int], NodeId] = {}
        self._proposals: dict[NodeId, Proposal] = {}

    @property
    def tip(self) -> NodeId:
        """The last committed node; ``NO_PARENT`` before the first token."""
        return self.slots.tip

    @property
    def length(self) -> int:
        """Committed tokens in the cache."""
        return self.slots.committed

    def child(self, parent: NodeId, token: int) -> NodeId | None:
        """The computed child of ``parent`` with this token."""
        return self._children.get((parent, token))

    def proposal(self, node: NodeId, width: int) -> Proposal:
        """The ``width`` best successors of a computed node."""
        tokens, log_probs = self._proposals[node]
        assert len(tokens) >= width, "fewer successors were learned"
        return tokens[:width], log_probs[:width]

    def learn(self, node: NodeId, proposal: Proposal) -> None:
        """Remember the successors of a computed node, best first."""
        self._proposals[node] = proposal

    def path(self, tokens: Sequence[int]) -> list[NodeId]:
        """The nodes below the tip that ``tokens`` lead through, as far as they are computed."""
        nodes: list[NodeId] = []
        node = self.tip
        for token in tokens:
            child = self.child(node, token)
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def leads_through(self, tokens: Sequence[int]) -> bool:
        """Whether all of ``tokens`` are computed below the tip."""
        return len(self.path(tokens)) == len(tokens)

    def advance(self, tokens: Sequence[int]) -> tuple[int, tuple[int, ...] | None]:
        """Commit ``tokens`` as far as they are computed: how many were, and the slots that stay,
        for a compaction from the *old* ``length`` on (None: nothing moves). What does not lie below
        the last of ``tokens`` is forgotten."""
        path = self.path(tokens)
        node = path[-1] if path else self.tip
        below: set[NodeId] = set()
        if len(path) == len(tokens):
            for child, entry in self.slots.speculative.items():  # parents come first
                if entry.parent in below or entry.parent == node:
                    below.add(child)
        return len(path), self._keep(set(path), below)

    def append(self, tokens: Sequence[int]) -> tuple[Row, ...]:
        """Commit tokens not computed yet, with an empty tree; the rows that compute them."""
        self._proposals.clear()
        ids = self._issue(len(tokens))
        parents = [self.tip, *ids[:-1]]
        self.slots, rows = allocate(self.slots, ids, parents, lambda _: True)
        return rows

    def add_child(self, wanted: Wanted) -> tuple[tuple[NodeId, ...], tuple[Row, ...]]:
        """New nodes below computed ones, and the rows of the pass that computes them."""
        ids = self._issue(len(wanted))
        parents = [parent for parent, _ in wanted]
        self.slots, rows = allocate(self.slots, ids, parents, lambda _: False)
        self._children |= dict(zip(wanted, ids, strict=True))
        return ids, rows

    def add_chain(self, tokens: Sequence[int]) -> tuple[tuple[NodeId, ...], tuple[Row, ...]]:
        """New nodes, each below the one before and the first below the tip, and their rows."""
        ids = self._issue(len(tokens))
        parents = [self.tip, *ids[:-1]]
        self.slots, rows = allocate(self.slots, ids, parents, lambda _: False)
        self._children |= dict(zip(zip(parents, tokens, strict=True), ids, strict=True))
        return ids, rows

    def committed_rows(self, start: int) -> tuple[Row, ...]:
        """The rows that compute the committed nodes from ``start`` on again."""
        slots = range(start, self.length)
        return tuple(Row(slot, slot, tuple(range(start, slot + 1))) for slot in slots)

    def forget_tree(self) -> None:
        """Drop everything below the tip and what is remembered of it."""
        self.forget_below()
        self._proposals.clear()

    def forget_below(self) -> None:
        """Drop everything below the tip."""
        self._keep(set(), set())

    def check(self) -> None:
        """Raise ``AssertionError`` where the bookkeeping contradicts itself."""
        speculative = set(self.slots.speculative_nodes)
        assert set(self._children.values()) == speculative
        assert self._proposals.keys() <= speculative | {self.tip}
        assert all(parent in speculative | {self.tip} for parent, _ in self._children)

    def _issue(self, many: int) -> tuple[NodeId, ...]:
        return tuple(NodeId(number) for number in islice(self._ids, many))

    def _keep(self, path: set[NodeId], below: set[NodeId]) -> tuple[int, ...] | None:
        alive = path | below
        self.slots, stay = reclaim(self.slots, path.__contains__, alive.__contains__)
        self._children = {key: node for key, node in self._children.items() if node in below}
        held = below | {self.tip}
        self._proposals = {node: known for node, known in self._proposals.items() if node in held}
        return stay


P = TypeVar("P")


class TrieGrower(Grower, Generic[P]):
    """A ``Grower`` over a trie: nothing is computed twice."""

    def __init__(
        self,
        trie: Trie,
        room: int,
        max_nodes: int,
        tree_pass: Callable[[Wanted], P],
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """``room``: levels below the tip that the model's context has place for. ``max_nodes``:
        successors a node can have at all. ``tree_pass``: adds nodes to the trie; the pass
        that computes them. ``stop``: the tree is abandoned."""
        self._trie = trie
        self._stop = stop
        self._most = max_nodes
        self._room = room if trie.tip != NO_PARENT else -1
        self._tree_pass = tree_pass
        # By candidate: parent, token, level below the tip.
        self._candidates: list[tuple[int, int, int]] = []
        self._nodes: dict[int, NodeId] = {TIP: trie.tip}

    def add_child(self, parent: int, token: int) -> None:
        self._candidates.append((parent, token, self._level(parent) + 1))

    def prepare(self, nodes: Sequence[int]) -> Iterator[P]:
        if (missing := self._missing(nodes)) and not self._stop():
            candidates = [self._candidates[candidate] for candidate in missing]
            yield self._tree_pass([(self._nodes[parent], token) for parent, token, _ in candidates])

    def propose(self, nodes: Sequence[int], width: int) -> list[Proposal]:
        width = min(width, self._most)
        expanded = [self._node(node) if self._fits(node) else None for node in nodes]
        return [
            NO_PROPOSAL if node is None else self._trie.proposal(node, width) for node in expanded
        ]

    def _level(self, node: int) -> int:
        return 0 if node == TIP else self._candidates[node][2]

    def _fits(self, node: int) -> bool:
        return self._level(node) < self._room

    def _missing(self, nodes: Sequence[int]) -> list[int]:
        """What one pass can compute: of each path the uppermost that fits the context."""
        missing: dict[int, None] = {}
        for node in filter(self._fits, nodes):
            top = None
            while self._node(node) is None:
                top, node = node, self._candidates[node][0]
            if top is not None:
                missing[top] = None
        return list(missing)

    def _node(self, candidate: int) -> NodeId | None:
        """The node of a candidate, if it is computed."""
        node = self._nodes.get(candidate)
        if node is None:
            parent, token, _ = self._candidates[candidate]
            above = self._node(parent)
            node = None if above is None else self._trie.child(above, token)
            if node is not None:
                self._nodes[candidate] = node
        return node
