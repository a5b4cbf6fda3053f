"""How much of this CPU's kernels can be relied on: what the self-test finds, all kernels use."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Mode = Literal["exact", "fast"]
Guarantee = Literal["bitwise", "tolerance"]
Quantize = Literal["none", "int8", "int4"]

BLOCK = 64
"""Positions are summed in blocks of this many, each block by one matrix product."""

REACH = 192
"""Longest product measured to be immune to zeros between its terms (MKL sgemm on AVX-512)."""


class Strips(Struct, frozen=True):
    """Numbers of rows for which attention's float32 products give every row the same bits.

    A product goes through its rows in strips, and where some are left over at the end they may
    meet another kernel, which adds up their terms in another order.
    """

    multiple: int = 8
    # None: any multiple will do.
    most: int | None = None

    def padded(self, rows: int) -> int:
        """``rows`` rounded up to whole strips."""
        return -(-rows // self.multiple) * self.multiple

    def one_product(self, rows: int) -> bool:
        """Whether ``rows`` rows are multiplied at once."""
        return self.most is None or rows <= self.most

    def parts(self, rows: int) -> list[tuple[int, int]]:
        """Start and number of the rows of each product that ``rows`` rows become."""
        most = self.most or rows
        return [(first, min(most, rows - first)) for first in range(0, rows, most)]


class Recipe(Struct, frozen=True):
    """Settings of exact mode."""

    # Longest tail of the cache whose masked-out slots may be summed as zeros; a multiple of BLOCK.
    # 0: never; each row's slots are gathered in order of position.
    reach: int = REACH
    # Attention's products have so many rows.
    strips: Strips = Strips()
    # Linear layers never see fewer rows.
    min_rows: int = 2
    # False: no number of rows was found from which on linear layers are blind to it, or no strips
    # of attention, or none are wanted.
    blind_rows: bool = True
    # False: the private oneDNN operators are not to be used.
    packed: bool = True


FAST = Recipe(min_rows=1, blind_rows=False)
"""Whatever is quick: of ``fast`` mode and of drafts."""
