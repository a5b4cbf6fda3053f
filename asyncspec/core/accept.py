"""Sample-and-match: which path of a tree the target has confirmed (design, section 6).

The last stage draws the target's next token for every judged node by the request's sampling
settings. The draft node walks the tree along those tokens. For a tree of fixed candidates this is
exact in distribution, greedy or sampled, and it accepts as much as any exact scheme can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from asyncspec.core import tree as trees
from asyncspec.core.tree import TokenTree
from asyncspec_protocol.ids import NodeId


class Walk(Struct, frozen=True):
    """What verdicts say about a tree: the accepted nodes, then where the walk ended."""

    # Nodes below the root on the path of the target's tokens, top down.
    accepted: tuple[NodeId, ...]
    # The target's token after the last of them where no node carries it: a miss. None means the
    # walk ended at a node whose verdict is still to come: the round goes on.
    bonus: int | None


class Opinion(Struct, frozen=True):
    """What the target said of a node's successor."""

    # The token that was drawn by the request's sampling settings.
    drawn: int
    # The likeliest tokens, best first, and their log-probabilities (nats) before any such setting;
    # empty where the policy does not ask for them.
    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    # The drawn token's own, where the user asks for it.
    log_prob: float | None = None

    def of(self, token: int) -> float | None:
        """The log-probability of a token that was chosen; None where it is not known."""
        if token == self.drawn:
            return self.log_prob
        known = dict(zip(self.tokens, self.log_probs, strict=True))
        return known.get(token)


Choose = Callable[[TokenTree, NodeId, Opinion], int]
"""The token that counts. Of a lossless policy it is the drawn one."""


def drawn(tree: TokenTree, node: NodeId, opinion: Opinion) -> int:
    """The lossless choice."""
    return opinion.drawn


def walk(tree: TokenTree, judged: Mapping[NodeId, Opinion], choose: Choose = drawn) -> Walk:
    """Follow the chosen tokens from the root downwards."""
    accepted: list[NodeId] = []
    node = tree.root
    while (opinion := judged.get(node)) is not None:
        token = choose(tree, node, opinion)
        below = trees.child(tree, node, token)
        if below is None:
            return Walk(tuple(accepted), token)
        accepted.append(below)
        node = below
    return Walk(tuple(accepted), None)
