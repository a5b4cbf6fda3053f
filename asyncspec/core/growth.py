"""What a draft tree grows from and into: values that trees, policies and token sources share."""

from __future__ import annotations

from msgspec import Struct

TIP = -1
"""Stands for the tip where a candidate is named by its index."""

Grown = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""Parents (index into the same list, or ``TIP``), tokens and cumulative scores."""


class Shape(Struct, frozen=True):
    """What is to grow below each node it starts from."""

    # Levels.
    depth: int
    # Children per node; ``widths`` says it level by level.
    width: int
    # Most nodes in all, the best ones.
    count: int
    # Nodes of a level that are expanded further; 0: as many as ``width`` (EAGLE-2).
    beam: int = 0
    # Only the beam of a level stays (PipeDec, SpecPipe); else all children stay candidates.
    fixed_width: bool = False
    # Children per node of every level, where they differ (SpecInfer's fixed shapes).
    widths: tuple[int, ...] = ()

    def children(self, level: int) -> int:
        """Children per node of a level, counted from 0."""
        return self.widths[level] if self.widths else self.width


class Start(Struct, frozen=True):
    """Where a tree grows from: a known part of it, and the nodes in it to expand."""

    known: Grown = ((), (), ())
    # Indices into ``known``, or ``TIP``.
    frontier: tuple[int, ...] = (TIP,)
    # Known nodes compete with the new ones for their places.
    compete: bool = False


FROM_TIP = Start()
