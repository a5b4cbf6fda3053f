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

ROW_MULTIPLE = 8
"""Attention rows are padded to a multiple of this: the width of a row kernel."""


class Recipe(Struct, frozen=True):
    """Settings of exact mode."""

    # Longest tail of the cache whose masked-out slots may be summed as zeros; a multiple of BLOCK.
    # 0: never; each row's slots are gathered in order of position.
    reach: int = REACH
    # Linear layers never see fewer rows.
    min_rows: int = 2
    # False: no number of rows was found from which on linear layers are blind to it, or none is
    # wanted.
    blind_rows: bool = True
    # False: the private oneDNN operators are not to be used.
    packed: bool = True


FAST = Recipe(min_rows=1, blind_rows=False)
"""Whatever is quick: of ``fast`` mode and of drafts."""
