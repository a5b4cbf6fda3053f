"""Which nodes of a session are alive: what one prune after another leaves (design, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from msgspec import Struct

from asyncspec_protocol.ids import NodeId, Version
from asyncspec_protocol.messages import PruneIndices

NO_NODES: frozenset[NodeId] = frozenset()


class Liveness(Struct, frozen=True):
    """The draft node's decisions as far as they have reached a stage. A node issued before
    ``horizon`` lives if it is a prompt node, accepted or kept; a younger one until a prune says
    otherwise."""

    prompt_length: int
    version: Version = Version(0)
    horizon: NodeId = NodeId(0)
    accepted: frozenset[NodeId] = NO_NODES
    keep: frozenset[NodeId] = NO_NODES

    def committed(self, node: NodeId) -> bool:
        """True for nodes known to be on the committed path (of those not yet in every cache)."""
        return node < self.prompt_length or node in self.accepted

    def alive(self, node: NodeId) -> bool:
        """True for every node that is not dead; the dead stay dead."""
        return node >= self.horizon or self.committed(node) or node in self.keep

    def living(self, nodes: Collection[NodeId]) -> Sequence[int]:
        """Places of the living in ``nodes``; most often all, without a look at each."""
        horizon, accepted, keep = self.horizon, self.accepted, self.keep
        if keep.issuperset(nodes) or min(nodes) >= horizon:
            return range(len(nodes))
        prompt = self.prompt_length
        return [
            i
            for i, node in enumerate(nodes)
            if node >= horizon or node in keep or node in accepted or node < prompt
        ]

    def holds(self, nodes: Collection[NodeId]) -> Callable[[NodeId], bool]:
        """``alive`` for many ``nodes`` at once: where none of them is of the prompt or too young to
        be named, those alive are just those that the last prune has named."""
        if nodes and self.prompt_length <= min(nodes) and max(nodes) < self.horizon:
            return (self.keep | self.accepted).__contains__
        return self.alive

    def apply(self, prune: PruneIndices) -> Liveness:
        """Liveness after ``prune``. A prune that is older than the last changes nothing."""
        if prune.version <= self.version:
            return self
        return Liveness(
            prompt_length=self.prompt_length,
            version=prune.version,
            horizon=prune.horizon,
            accepted=frozenset(prune.accepted),
            keep=frozenset(prune.keep),
        )
