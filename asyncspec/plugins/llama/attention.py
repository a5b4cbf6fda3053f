"""Which of llama.cpp's two ways to compute attention a context takes.

Its flash attention on the CPU computes each head's row by itself, up to 63 rows a pass, and reads
the keys of a group of heads once for every head of it. Products of matrices read them once for all
rows, but keep the scores of all heads, rows and cells in memory, and add values up along the cells,
so that a row's bits depend on where its ancestors lie. So exact mode has flash attention, and what
needs no bits (fast mode, drafts) has it where a GPU computes.
"""

from __future__ import annotations

from asyncspec.backend.base import EngineOptions, Mode

AUTO, OFF, ON = -1, 0, 1
"""``enum llama_flash_attn_type``: what the device has, products of matrices, flash attention."""

_NAMED = {"auto": AUTO, "off": OFF, "on": ON}

UNFUSED_ROWS = 64
"""Most rows of a pass without flash attention on the CPU. As many take the time a row that 256
take, and their scores a quarter of the memory."""

SPARE_ROWS = 16
"""Rows that a context has room for beyond the most of a pass."""

_SCORE_BYTES = 6
"""A score in float32, and in float16 where it is multiplied with values of this type."""


def flash_type(options: EngineOptions, mode: Mode, *, on_gpu: bool) -> int:
    """Attention of a stage or, in fast mode, of a draft model."""
    chosen = _NAMED[options.flash_attention]
    # Values of a quantised cache have no other product.
    if chosen != AUTO or mode == "exact" or on_gpu or options.kv_type == "q8_0":
        return chosen
    return OFF


def score_bytes(heads: int, flash: int) -> int:
    """Memory of a pass's scores for each cell of the cache, on the CPU."""
    return _SCORE_BYTES * heads * (UNFUSED_ROWS + SPARE_ROWS) if flash == OFF else 0
