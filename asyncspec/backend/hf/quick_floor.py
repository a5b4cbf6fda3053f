"""With how few rows a product is at its quickest, tried at start on the weights that were loaded.

A product of few rows takes as long as its weights take to be read, and a kernel may read them
slower for one or two rows than for four: oneDNN's in float32 on an EPYC of 2022 by a quarter, and
on one of 2021 faster. So a stage finds out, and fills its passes up where that is quicker. No
row's bits are other ones for it in exact mode: the self-test has found them alike.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import torch

from asyncspec.backend.hf.linear import RowLinear, RowwiseLinear
from asyncspec.backend.hf.noise import noise

QUICK = 4
"""Rows that are tried instead of a product's own floor."""

SAMPLE = 256 << 20
"""Bytes of weights that are multiplied, so many times more than a cache holds."""

LEAST = 64 << 20
"""Bytes: what has less fits a cache, and is tried too soon to tell."""

GAIN = 0.95
"""It has to take less than so much of the time."""

_TIMES = 3


def set_quick_floor(linears: Sequence[RowwiseLinear]) -> None:
    """Raise the row floor of packed float32 layers to ``QUICK`` where fewer take longer."""
    packed = [linear for linear in linears if _packed(linear)]
    ends = list(accumulate(linear.weight_bytes for linear in packed))
    if not packed or ends[-1] < LEAST:
        return
    tried = packed[: bisect_left(ends, SAMPLE) + 1]
    floor = max(linear.min_rows for linear in packed)
    if floor < QUICK and quicker(tried, floor):
        for linear in packed:
            linear.min_rows = QUICK


def quicker(linears: Sequence[RowwiseLinear], floor: int) -> bool:
    """Whether products of ``QUICK`` rows take less time than those of ``floor``, all together and
    turn about."""
    least = {floor: float("inf"), QUICK: float("inf")}
    for _ in range(_TIMES):
        for rows in least:
            least[rows] = min(least[rows], _seconds(linears, rows))
    return least[QUICK] < GAIN * least[floor]


def _packed(linear: RowwiseLinear) -> bool:
    return type(linear) is RowLinear and linear.packed and linear.dtype == torch.float32


def _seconds(linears: Sequence[RowwiseLinear], rows: int) -> float:
    widths = {linear.in_features for linear in linears}
    inputs = {width: noise(rows, width) for width in widths}
    start = time.perf_counter()
    for linear in linears:
        linear.product(inputs[linear.in_features])
    return time.perf_counter() - start
