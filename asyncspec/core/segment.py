"""Cutting an ordered list of nodes into segments (FlowSpec III-B)."""

from __future__ import annotations

from collections.abc import Container, Sequence

from asyncspec.core.tree import TokenTree
from asyncspec_protocol.ids import NodeId


def share(count: int, pieces: int, longest: int) -> int:
    """Size of the next of ``pieces`` near-equal pieces of ``count`` items, larger ones first, and
    none above ``longest`` (what remains then needs more pieces)."""
    return min(longest, -(-count // max(1, pieces)))


def connected(tree: TokenTree, nodes: Sequence[NodeId], sent: Container[NodeId]) -> bool:
    """True where every node's parent has been sent or stands earlier in ``nodes``. The root's own
    parent is on the committed path and needs no check."""
    seen: set[NodeId] = set()
    for node in nodes:
        parent = tree.nodes[node].parent
        if node != tree.root and parent not in sent and parent not in seen:
            return False
        seen.add(node)
    return True
