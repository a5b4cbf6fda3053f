"""Sample-and-match: which path of a tree the target has confirmed (design, section 6).

The last stage draws the target's next token for every judged node by the request's sampling
settings. The draft node walks the tree along those tokens. For a tree of fixed candidates this is
exact in distribution, greedy or sampled, and it accepts as much as any exact scheme can.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from asyncspec import tree as trees
from asyncspec.tree import TokenTree
from asyncspec_protocol.ids import NodeId


class Walk(Struct, frozen=True):
    """What verdicts say about a tree: the accepted nodes, then where the walk ended."""

    # Nodes below the root on the path of the target's tokens, top down.
    accepted: tuple[NodeId, ...]
    # The target's token after the last of them where no node carries it: a miss. None means the
    # walk ended at a node whose verdict is still to come: the round goes on.
    bonus: int | None


def walk(tree: TokenTree, judged: Mapping[NodeId, int]) -> Walk:
    """Follow the target's tokens (``judged``: node -> next token) from the root downwards."""
    accepted: list[NodeId] = []
    node = tree.root
    while (token := judged.get(node)) is not None:
        below = trees.child(tree, node, token)
        if below is None:
            return Walk(tuple(accepted), token)
        accepted.append(below)
        node = below
    return Walk(tuple(accepted), None)
