"""The tree that is measured: a full binary one, whose halves hang from the tip.

Node ``i`` hangs from node ``i // 2 - 1``, so parents come before children and the depth is that of
a draft tree: 4 levels at 16 nodes, 10 at 1,024.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncspec.core.jobs import Row

TIP = -1
"""The parent of the first two nodes."""


def parent(node: int) -> int:
    """Of the ``node``-th of the tree; ``TIP`` for the first two."""
    return node // 2 - 1


def line(node: int) -> tuple[int, ...]:
    """The nodes above and the node itself, from the top."""
    found = [node]
    while (above := parent(found[-1])) != TIP:
        found.append(above)
    return tuple(reversed(found))


def half(count: int) -> tuple[int, ...]:
    """Of ``count`` nodes, those below node 0."""
    return tuple(node for node in range(1, count) if line(node)[0] == 0)


def rows(start: int, nodes: Sequence[int]) -> tuple[Row, ...]:
    """Rows of a pass: node ``i`` sits in slot ``start + i`` behind ``start`` committed ones."""
    lines = [line(node) for node in nodes]
    return tuple(
        Row(start + above[-1], start + len(above) - 1, tuple(start + i for i in above))
        for above in lines
    )
