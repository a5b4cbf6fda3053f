"""Chances of drafted nodes to be on the committed path: what the token source states, corrected by
what the target chose."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from msgspec import Struct

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.tree import TokenTree, child
from asyncspec_protocol.ids import NodeId

_PRIOR = PARAMETERS.prior_acceptance
RANKS = len(_PRIOR)
"""Ranks among siblings, by stated chance, that are told apart."""


class Acceptance(Struct, frozen=True):
    """Exponentially weighted sums over the nodes of committed paths that had children, by the
    children's rank. Each begins with ``acceptance_prior`` nodes as ``prior_acceptance`` has them.
    """

    # Nodes with a child of that rank, and those where the target chose it.
    nodes: tuple[float, ...] = (PARAMETERS.acceptance_prior,) * RANKS
    hits: tuple[float, ...] = tuple([PARAMETERS.acceptance_prior * p for p in _PRIOR])
    # Sum of the chances that the source stated for these children.
    stated: tuple[float, ...] = tuple([PARAMETERS.acceptance_prior * p for p in _PRIOR])
    # Nodes in all.
    observed: int = 0

    @property
    def profile(self) -> tuple[float, ...]:
        """Mean chances of the children of a node that is reached, by rank; they never rise, and
        sum up to 1 at most."""
        found: list[float] = []
        left = 1.0
        for hits, nodes in zip(self.hits, self.nodes, strict=True):
            found.append(min([hits / nodes, left, *found[-1:]]))
            left -= found[-1]
        return tuple(found)

    def observe(self, tree: TokenTree, tokens: Sequence[int]) -> Acceptance:
        """With the target's tokens after the root, as far as they follow nodes with children."""
        below, node, found = _ranked(tree), tree.root, self
        for token in tokens:
            if node not in below:
                break
            chosen = child(tree, node, token)
            found = found._with(below[node], chosen)
            if chosen is None:
                break
            node = chosen
        return found

    def _with(self, children: Sequence[tuple[NodeId, float]], chosen: NodeId | None) -> Acceptance:
        keep = 1.0 - PARAMETERS.acceptance_weight
        nodes, hits, stated = list(self.nodes), list(self.hits), list(self.stated)
        for rank, (node, chance) in enumerate(children[:RANKS]):
            nodes[rank] = keep * nodes[rank] + 1.0
            hits[rank] = keep * hits[rank] + (node == chosen)
            stated[rank] = keep * stated[rank] + chance
        return Acceptance(tuple(nodes), tuple(hits), tuple(stated), self.observed + 1)

    def chances(self, tree: TokenTree) -> dict[NodeId, float]:
        """The chance of every node to be on the committed path, given that the root is: parents
        come first and have a higher one."""
        prior, sums = PARAMETERS.correction_prior, zip(self.hits, self.stated, strict=True)
        factors = [(hits + prior) / (stated + prior) for hits, stated in sums]
        chances, below = {tree.root: 1.0}, _ranked(tree)
        for node in tree.nodes:
            for rank, (one, chance) in enumerate(below.get(node, ())):
                corrected = chance * factors[min(rank, RANKS - 1)]
                chances[one] = chances[node] * min(1.0, corrected)
        return chances


def _ranked(tree: TokenTree) -> Mapping[NodeId, Sequence[tuple[NodeId, float]]]:
    """The children of every node that has some with their stated chances, the likeliest first."""
    below: dict[NodeId, list[tuple[NodeId, float]]] = {}
    for node, data in tree.nodes.items():
        if node != tree.root:
            stated = math.exp(data.score - tree.nodes[data.parent].score)
            below.setdefault(data.parent, []).append((node, stated))
    for siblings in below.values():
        siblings.sort(key=lambda pair: -pair[1])
    return below
