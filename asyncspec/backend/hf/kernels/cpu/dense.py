"""Dense weights as the product that this CPU does best."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import torch

from asyncspec.backend.hf.checkpoint import stored_type
from asyncspec.backend.hf.checkpoint_files import TensorInfo
from asyncspec.backend.hf.kernels.cpu.capabilities import Recipe, product_type, reads_half
from asyncspec.backend.hf.kernels.cpu.half_precision import HalfLinear, WidenedLinear, magnitude
from asyncspec.backend.hf.kernels.cpu.linear import RowLinear, RowwiseLinear
from asyncspec.backend.hf.kernels.cpu.mapped import can_map
from asyncspec.backend.hf.kernels.cpu.ort import MlasLinear, is_quickest
from asyncspec.backend.hf.probing import noise

SMALL = 2 << 20
"""Weights of a layer: 4 MiB of float16, which take a processor as long to read as torch's
operations around the products."""


def kept_type(stored: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """The type in which a layer for rows of ``dtype`` keeps weights that are ``stored`` so."""
    half = stored == torch.float16 and dtype == torch.float32 and reads_half()
    return torch.float16 if half else dtype


def widens(count: int) -> bool:
    """Whether a layer of ``count`` weights keeps float16 ones as float32 although it need not:
    where reading twice the bytes takes less time than a layer in one piece saves (``fused/``). Each
    for itself, so that its bits are the same however the model is cut."""
    return count <= SMALL and is_quickest()


def may_wait(info: TensorInfo, dtype: torch.dtype, count: int) -> bool:
    """Whether a layer of ``count`` weights, for rows of ``dtype``, will multiply a matrix by
    onnxruntime, and so may leave it in its file until the layer is known (``mapped.py``)."""
    if dtype != torch.float32:
        return False
    if can_map(info):
        return is_quickest()
    return stored_type(info) == torch.float16 and widens(count)


def dense_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Recipe,
    dtype: torch.dtype,
    *,
    shared: bool = False,
) -> RowwiseLinear:
    """A linear layer for rows of ``dtype`` of ``weight`` [N, K], which is of that type or of its
    ``kept_type``; in memory of its own unless ``shared``."""
    if weight.dtype == dtype == product_type(dtype):
        return _as_kept(weight, bias, recipe, shared=shared)
    # FBGEMM would make numbers of what is none.
    if reads_half() and not shared and math.isfinite(magnitude(weight)):
        return HalfLinear(weight, bias, dtype, recipe)
    if weight.dtype == dtype:
        return WidenedLinear(weight, bias, recipe, shared=shared)
    return _as_kept(weight.to(dtype), bias, recipe)


def _as_kept(
    weight: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe, *, shared: bool = False
) -> RowwiseLinear:
    """Of weights that are multiplied in the type they are kept in."""
    if weight.dtype == torch.float32 and not shared and is_quickest():
        return MlasLinear(weight, bias)
    return RowLinear(weight, bias, recipe, shared=shared)


# --- With how few rows a product is at its quickest, tried at start on the weights that were
# loaded.
# A product of few rows takes as long as its weights take to be read, and a kernel may read them
# slower for one or two rows than for four: oneDNN's in float32 on an EPYC of 2022 by a quarter,
# and on one of 2021 faster. So a stage finds out, and fills its passes up where that is quicker.
# No row's bits are other ones for it in exact mode: the self-test has found them alike.

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
