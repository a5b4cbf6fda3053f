"""What sessions need of one draft pass, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from asyncspec.backend.hf.attention import FastAttention, Tree
from asyncspec.backend.hf.cache import TreeCache
from asyncspec.backend.hf.together import TogetherAttention, slices
from asyncspec.jobs import Row
from asyncspec_protocol.ids import NodeId


@dataclass(frozen=True, slots=True)
class DraftPass:
    """One session's part: rows whose places in its trie and cache are taken already."""

    cache: TreeCache
    committed: int
    rows: Sequence[Row]
    tokens: Sequence[int]
    # The last rows are these nodes, whose successors are wanted.
    nodes: Sequence[NodeId]


class SharedPass:
    """The rows of all ``parts``, one part after the other."""

    def __init__(self, parts: Sequence[DraftPass]) -> None:
        trees = [FastAttention(part.cache, part.committed, part.rows) for part in parts]
        self.count = sum(len(part.rows) for part in parts)
        self.tree: Tree = trees[0] if len(trees) == 1 else TogetherAttention(trees)
        self.positions = torch.tensor([row.position for part in parts for row in part.rows])
        # The rows whose successors are wanted.
        self.wanted: list[int] = []
        for part, own in zip(parts, slices(trees), strict=True):
            self.wanted += range(own.stop - len(part.nodes), own.stop)
