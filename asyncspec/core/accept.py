"""Sample-and-match acceptance: the path that the target confirms (design, section 6).

The last stage samples the target's next token for every verified node; the draft node walks the
tree along those tokens. For a tree of fixed candidates this is exact in distribution, greedy or
sampled, and accepts as much as any exact scheme can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from asyncspec.core import tree as trees
from asyncspec.core.tree import TokenTree
from asyncspec_protocol.ids import NodeId


class Walk(Struct, frozen=True):
    """The accepted nodes of a tree, and how the walk ended."""

    # Nodes below the root on the path of the target's tokens, top down.
    accepted: tuple[NodeId, ...]
    # The target's token after the last of them where no node carries it: a miss. None: the walk
    # ended at a node whose verdict is still to come, and the round continues.
    bonus: int | None


class TargetOutput(Struct, frozen=True):
    """The token that the target draws after one node, and its likeliest tokens, best first, with
    log-probabilities in nats."""

    # Sampled by the request's settings.
    token: int
    # The likeliest tokens, best first, and their log-probabilities (nats) before any sampling
    # setting; empty where neither policy nor user requests them.
    top_tokens: tuple[int, ...] = ()
    top_log_probs: tuple[float, ...] = ()
    # Log-probability of ``token``, where the user requests it.
    log_prob: float | None = None

    def log_prob_of(self, token: int) -> float | None:
        """Log-probability in nats of ``token``; None where the target did not report it."""
        if token == self.token:
            return self.log_prob
        likeliest = dict(zip(self.top_tokens, self.top_log_probs, strict=True))
        return likeliest.get(token)


Choose = Callable[[TokenTree, NodeId, TargetOutput], int]
"""The token that follows a node. A lossless policy takes the sampled one."""


def sampled(tree: TokenTree, node: NodeId, output: TargetOutput) -> int:
    """The lossless choice."""
    return output.token


def walk(
    tree: TokenTree, verified: Mapping[NodeId, TargetOutput], choose: Choose = sampled
) -> Walk:
    """Follow the chosen tokens from the root downwards."""
    accepted: list[NodeId] = []
    node = tree.root
    while (output := verified.get(node)) is not None:
        token = choose(tree, node, output)
        below = trees.child(tree, node, token)
        if below is None:
            return Walk(tuple(accepted), token)
        accepted.append(below)
        node = below
    return Walk(tuple(accepted), None)
