"""Passes of llama.cpp over rows of trees, of models with recurrent layers.

Rows are computed in chains, each in a sequence of its own (``states``): a pass over a chain is one
call of llama.cpp, one over a tree as many as it has levels of chains, at most. Chains of equal
length, of one or of several sessions, share a call. A row's bits depend on the length of its chain,
so the guarantee is a tolerance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import numpy as np
from msgspec import Struct

from asyncspec.core.errors import ClusterError
from asyncspec.plugins.llama.branches import Node
from asyncspec.plugins.llama.cache_engine import CacheEngine, Floats, Settings, with_ancestors
from asyncspec.plugins.llama.library import Model
from asyncspec.plugins.llama.passes import Engine
from asyncspec.plugins.llama.states import States

Rows = Sequence[tuple[States, Node]]


class Chain(Struct, frozen=True, eq=False):
    """Nodes of a session, each the parent of the next."""

    states: States
    nodes: list[Node]

    @property
    def start(self) -> Node | None:
        """The node that it goes on from; None: the trunk's end."""
        return next(self.states.path(self.nodes[0].parent), None)


class Results(Struct):
    """What a pass has computed so far. ``scored``: nodes whose logits are wanted."""

    scored: Set[Node]
    # Hidden states by the names of tensors, then by node.
    captured: dict[str, dict[Node, Floats]]
    logits: dict[Node, Floats] = {}


def chains(rows: Rows, longest: int) -> list[Chain]:
    """Rows, parents first, in as few chains as their forks allow, of at most ``longest`` nodes. One
    ends where a session's state is to be kept."""
    among = {node for _, node in rows}
    forks: Counter[Node | None] = Counter(node.parent for _, node in rows if node.parent in among)
    ends: dict[Node, Chain] = {}
    whole: list[Chain] = []
    for states, node in rows:
        above = ends.pop(node.parent, None) if node.parent is not None else None
        begins = forks[node.parent] > 1 or node.position == states.border
        if above is None or len(above.nodes) == longest or begins:
            above = Chain(states, [])
            whole.append(above)
        above.nodes.append(node)
        ends[node] = above
    return whole


def equal_lengths(started: Mapping[int, Chain], most_rows: int) -> list[list[tuple[int, Chain]]]:
    """Chains in groups of equal lengths, with no more rows than ``most_rows`` each."""
    groups: list[list[tuple[int, Chain]]] = []
    for sequence, chain in sorted(started.items(), key=lambda item: len(item[1].nodes)):
        length, group = len(chain.nodes), groups[-1] if groups else []
        if group and len(group[0][1].nodes) == length and length * (len(group) + 1) <= most_rows:
            group.append((sequence, chain))
        else:
            groups.append([(sequence, chain)])
    return groups


class RecurrentEngine(CacheEngine[States]):
    """A model with recurrent layers and its cache."""

    @property
    def _twins(self) -> int:
        # No sequence is ever cut back, so windows may go on.
        return 1

    @property
    def _bound_sequences(self) -> int:
        # Each takes a state; there are no dead rows and no padding.
        return self.settings.sequences

    def _new_session(self) -> States:
        return States(self, self.pool)

    def _free_one(self, branches: States) -> None:
        self._evict(1, ())
        self._park(1, {branches})

    def _some(
        self,
        rows: Rows,
        wanted: Sequence[bool],
        captured: dict[str, list[Floats]],
        logits: list[Floats],
    ) -> None:
        scored = [node for (_, node), row in zip(rows, wanted, strict=True) if row]
        results = Results({*scored}, {name: {} for name in captured})
        pending = chains(with_ancestors(rows)[0], self.most_rows)
        while pending:
            started = self._start(pending)
            try:
                for group in equal_lengths(started, self.most_rows):
                    self._run_group(group, results)
                    for sequence, chain in group:
                        chain.states.settle(sequence)
                        del started[sequence]
            finally:
                for sequence, chain in started.items():
                    chain.states.drop(sequence)
        for name, parts in captured.items():
            parts.append(np.stack([results.captured[name][node] for _, node in rows]))
        if scored:
            logits.append(np.stack([results.logits[node] for node in scored]))

    def _start(self, pending: list[Chain]) -> dict[int, Chain]:
        """Take those of ``pending`` that can be computed now, at least one, and give each a
        sequence. Where the snapshot that a chain begins at is gone, the rows from an earlier one on
        become a chain before it."""
        started: dict[int, Chain] = {}
        while True:
            waiting = {node for chain in pending for node in chain.nodes}
            waiting |= {node for chain in started.values() for node in chain.nodes}
            ready = [chain for chain in pending if chain.start not in waiting]
            if not ready:
                return started
            chain = ready[0]
            states, start = chain.states, chain.start
            if start is not None and not start.cached:
                if started:
                    return started
                lost = with_ancestors([(states, start)])[0]
                # Next to each other, or another chain might take the snapshot in between.
                pending.remove(chain)
                pending[:0] = [*chains(lost, self.most_rows), chain]
                continue
            sequence = self._sequence(chain, pending, must=not started)
            if sequence < 0:
                return started
            pending.remove(chain)
            started[sequence] = chain

    def _sequence(self, chain: Chain, pending: Sequence[Chain], *, must: bool) -> int:
        """A sequence for a chain; -1: there is none to be had without what other chains need.
        ``must``: whatever is in the way goes, and is computed again."""
        states, start, end = chain.states, chain.start, chain.nodes[-1]
        wanted = 1 + states.is_parked
        starts = [other.start for other in pending if other.start is not None]
        self._evict(wanted, starts)
        alone = start is not None and starts.count(start) == 1
        if len(self.pool) < wanted and alone:
            assert start is not None
            return states.take(start, end)
        self._park(wanted, {states} | {other.states for other in pending})
        if len(self.pool) < wanted and must:
            self._evict(wanted, [] if start is None else [start])
            self._park(wanted, {states})
            if len(self.pool) < wanted and start is not None:
                return states.take(start, end)
        if len(self.pool) < wanted:
            if must:
                raise ClusterError("llama.cpp has fewer sequences than a pass needs")
            return -1
        if states.is_parked:
            self.unpark(states)
        return states.fork(start, end)

    def _evict(self, wanted: int, protected: Sequence[Node]) -> None:
        """Give up snapshots until there are so many free sequences."""
        for states in self.branches:
            if (lacking := wanted - len(self.pool)) > 0:
                states.evict(lacking, protected)

    def _park(self, wanted: int, users: Collection[States]) -> None:
        """Park sessions, other than ``users``, until there are so many free sequences."""
        for states in self.branches:
            if len(self.pool) < wanted and states not in users and not states.is_growing:
                states.park()

    def _run_group(self, group: Sequence[tuple[int, Chain]], results: Results) -> None:
        """Compute chains of one length."""
        members = {node: [sequence] for sequence, chain in group for node in chain.nodes}
        nodes = [*members]
        scored = [node for node in nodes if node in results.scored]
        self._pass(nodes, members, [node in results.scored for node in nodes])
        for name, by_node in results.captured.items():
            by_node.update(zip(nodes, self._captured[name], strict=True))
        if scored:
            results.logits.update(zip(scored, self._logits(len(scored)), strict=True))


def new_engine(
    model: Model, settings: Settings, last: str = "", *, first: str = ""
) -> CacheEngine[Any]:
    """The engine that a model needs, see ``CacheEngine``."""
    kind = RecurrentEngine if model.recurrent else Engine
    return kind(model, settings, last, first=first)
