"""Chances of drafted nodes to be on the committed path: what the token source states, corrected by
what the target chose."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import exp
from operator import itemgetter

from msgspec import Struct

from asyncspec.core.tree import TokenTree, child
from asyncspec.policy.flow.parameters import FLOW_PARAMETERS
from asyncspec_protocol.ids import NodeId

_PRIOR = FLOW_PARAMETERS.prior_acceptance
RANKS = len(_PRIOR)
"""Ranks among siblings, by stated chance, that are told apart."""

_BINS = 1 + len(FLOW_PARAMETERS.stated_bins)
_BINNED_RANKS = 3


class StatedSums(Struct, frozen=True):
    """Exponentially weighted: nodes that were hits, and the sum of the nodes' stated chances."""

    hits: float = 0.0
    stated: float = 0.0

    def observe(self, hit: bool, chance: float) -> StatedSums:
        """With one node more."""
        keep = 1.0 - FLOW_PARAMETERS.acceptance_weight
        return StatedSums(keep * self.hits + hit, keep * self.stated + chance)

    @property
    def factor(self) -> float:
        """Times what is stated that comes true."""
        prior = FLOW_PARAMETERS.correction_prior
        return (self.hits + prior) / (self.stated + prior)


class Acceptance(Struct, frozen=True):
    """Exponentially weighted sums over the nodes of committed paths that had children, by the
    children's rank. Each begins with ``acceptance_prior`` nodes as ``prior_acceptance`` has them.
    """

    # Nodes with a child of that rank, and these children.
    nodes: tuple[float, ...] = (FLOW_PARAMETERS.acceptance_prior,) * RANKS
    ranks: tuple[StatedSums, ...] = tuple(
        [
            StatedSums(FLOW_PARAMETERS.acceptance_prior * p, FLOW_PARAMETERS.acceptance_prior * p)
            for p in _PRIOR
        ]
    )
    # By rank, the last one for all others, and by stated chance (``stated_bins``).
    bins: tuple[StatedSums, ...] = (StatedSums(),) * (_BINS * _BINNED_RANKS)
    # Nodes in all.
    observed: int = 0

    @property
    def profile(self) -> tuple[float, ...]:
        """Mean chances of the children of a node that is reached, by rank; they never rise, and
        sum up to 1 at most."""
        means: list[float] = []
        left = 1.0
        for rank, nodes in zip(self.ranks, self.nodes, strict=True):
            mean = rank.factor * rank.stated / nodes
            means.append(min([mean, left, *means[-1:]]))
            left -= means[-1]
        return tuple(means)

    def observe(self, tree: TokenTree, tokens: Sequence[int]) -> Acceptance:
        """With the target's tokens after the root, as far as they follow nodes with children."""
        below, node, observed = _children(tree), tree.root, self
        for token in tokens:
            if node not in below:
                break
            chosen = child(tree, node, token)
            observed = observed._with(_ranked(tree, below[node]), chosen)
            if chosen is None:
                break
            node = chosen
        return observed

    def _with(self, children: Sequence[tuple[NodeId, float]], chosen: NodeId | None) -> Acceptance:
        keep = 1.0 - FLOW_PARAMETERS.acceptance_weight
        nodes, ranks, bins = list(self.nodes), list(self.ranks), list(self.bins)
        for rank, (node, chance) in enumerate(children[:RANKS]):
            hit, among = node == chosen, _bin(rank, chance)
            nodes[rank] = keep * nodes[rank] + 1.0
            ranks[rank] = ranks[rank].observe(hit, chance)
            bins[among] = bins[among].observe(hit, chance)
        return Acceptance(tuple(nodes), tuple(ranks), tuple(bins), self.observed + 1)

    def chances(self, tree: TokenTree, least: float = 0.0) -> dict[NodeId, float]:
        """The chances of nodes to be on the committed path, given that the root is, of all that
        have at least so high a one: parents come first and have a higher one."""
        # Asked several times a draft level, with every node: it keeps verdicts waiting.
        bounds, prior = FLOW_PARAMETERS.stated_bins, FLOW_PARAMETERS.bin_prior
        bins = [(candidate.hits, candidate.stated) for candidate in self.bins]
        factors = [prior * rank.factor for rank in self.ranks]
        chances = {tree.root: 1.0}
        for node, children in _children(tree).items():
            above = chances.get(node)
            if above is None:
                continue
            first, last = 0, (_BINNED_RANKS - 1) * _BINS
            for rank, (candidate, stated) in enumerate(_ranked(tree, children)):
                # As it came true; what is not known of its bin, as in its whole rank.
                hits, sums = bins[first + bisect_right(bounds, stated)]
                factor = factors[rank if rank < RANKS else RANKS - 1]
                came = hits + factor * stated
                chance = stated * came / max(1e-9, sums + prior * stated)
                chance = above * chance if chance < 1.0 else above
                if chance >= least:
                    chances[candidate] = chance
                if first < last:
                    first += _BINS
        return chances


def _bin(rank: int, chance: float) -> int:
    return min(rank, _BINNED_RANKS - 1) * _BINS + bisect_right(FLOW_PARAMETERS.stated_bins, chance)


def _children(tree: TokenTree) -> Mapping[NodeId, Sequence[NodeId]]:
    """The children of every node that has some, their parents in the tree's order."""
    below: dict[NodeId, list[NodeId]] = {}
    for node, data in tree.nodes.items():
        if node != tree.root:
            below.setdefault(data.parent, []).append(node)
    return below


def _ranked(tree: TokenTree, siblings: Sequence[NodeId]) -> Sequence[tuple[NodeId, float]]:
    """Siblings with their stated chances, the likeliest first."""
    nodes = tree.nodes
    parent = nodes[nodes[siblings[0]].parent].score
    stated = [(node, exp(nodes[node].score - parent)) for node in siblings]
    stated.sort(key=itemgetter(1), reverse=True)  # stable
    return stated
