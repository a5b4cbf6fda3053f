"""The fastest product of this CPU for dense weights."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from asyncspec.plugins.hf.checkpoint.checkpoint import stored_type
from asyncspec.plugins.hf.checkpoint.files.headers import TensorInfo
from asyncspec.plugins.hf.kernels.cpu.capabilities import KernelSettings, product_type, reads_half
from asyncspec.plugins.hf.kernels.cpu.half_precision import HalfLinear, UpcastLinear, max_abs
from asyncspec.plugins.hf.kernels.cpu.linear import PackedLinear, RowwiseLinear
from asyncspec.plugins.hf.kernels.cpu.ort import MlasLinear, can_mmap, prefers_mlas
from asyncspec.plugins.hf.kernels.probing import noise

SMALL_LAYER = 2 << 20
"""Weights of a layer; 4 MiB of float16 are read in the time torch needs around its products."""


def weight_dtype(stored: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """The type in which a layer for rows of ``dtype`` keeps weights that are ``stored`` so."""
    half = stored == torch.float16 and dtype == torch.float32 and reads_half()
    return torch.float16 if half else dtype


def upcasts_half(count: int) -> bool:
    """Whether a layer of ``count`` weights keeps float16 ones as float32 although it need not,
    as reading twice the bytes takes less time than fusing saves (``optimized/graphs.py``). Decided
    per layer, so that its bits do not depend on how the model is cut into stages."""
    return count <= SMALL_LAYER and prefers_mlas()


def can_defer(info: TensorInfo, dtype: torch.dtype, count: int) -> bool:
    """Whether a layer of ``count`` weights, for rows of ``dtype``, multiplies a matrix by
    onnxruntime, so that it may stay in its file until the layer is built (``ort.py``)."""
    if dtype != torch.float32 or info.transposed:
        return False
    if can_mmap(info):
        return prefers_mlas()
    return stored_type(info) == torch.float16 and upcasts_half(count)


def dense_linear(
    weight: Tensor,
    bias: Tensor | None,
    settings: KernelSettings,
    dtype: torch.dtype,
    *,
    shared: bool = False,
) -> RowwiseLinear:
    """A linear layer for rows of ``dtype`` of ``weight`` [N, K], which is of that type or of its
    ``weight_dtype``; in memory of its own unless ``shared``."""
    if not weight.dtype == dtype == product_type(dtype):
        # FBGEMM would turn infinities and NaN into numbers.
        if reads_half() and not shared and math.isfinite(max_abs(weight)):
            return HalfLinear(weight, bias, dtype, settings)
        if weight.dtype == dtype:
            return UpcastLinear(weight, bias, settings, shared=shared)
        weight, shared = weight.to(dtype), False
    if weight.dtype == torch.float32 and not shared and prefers_mlas():
        return MlasLinear(weight, bias)
    return PackedLinear(weight, bias, settings, shared=shared)


TUNED_MIN_ROWS = 4
"""Tried in place of a layer's own ``min_rows``."""

SAMPLE_BYTES = 256 << 20
"""Weights that are multiplied: many times what a cache holds."""

MIN_BYTES = 64 << 20
"""Fewer weights fit a cache, and timing them says nothing."""

MAX_TIME_SHARE = 0.95
"""``TUNED_MIN_ROWS`` is used where it takes less than this share of the time."""

_REPEATS = 3  # of a measurement, whose least counts


def tune_min_rows(linears: Sequence[RowwiseLinear]) -> None:
    """Raise ``min_rows`` of packed layers to ``TUNED_MIN_ROWS`` where that is faster on the loaded
    weights: a kernel may read them slower for one or two rows than for four (oneDNN's on an EPYC of
    2022 by a quarter, in bfloat16 by a third, on one of 2021 it is faster). Results are bitwise
    unchanged in exact mode, as the self-test has passed with fewer rows."""
    packed = [linear for linear in linears if type(linear) is PackedLinear and linear.packed]
    ends = list(accumulate(linear.weight_bytes for linear in packed))
    if not packed or ends[-1] < MIN_BYTES:
        return
    sample = packed[: bisect_left(ends, SAMPLE_BYTES) + 1]
    min_rows = max(linear.min_rows for linear in packed)
    if min_rows < TUNED_MIN_ROWS and is_faster(sample, min_rows):
        for linear in packed:
            linear.min_rows = TUNED_MIN_ROWS


def is_faster(linears: Sequence[RowwiseLinear], min_rows: int) -> bool:
    """Whether ``TUNED_MIN_ROWS`` rows take less time than ``min_rows``, over all layers."""
    untuned = tuned = float("inf")
    for _ in range(_REPEATS):
        untuned = min(untuned, _seconds(linears, min_rows))
        tuned = min(tuned, _seconds(linears, TUNED_MIN_ROWS))
    return tuned < MAX_TIME_SHARE * untuned


def _seconds(linears: Sequence[RowwiseLinear], rows: int) -> float:
    # Routers have another type than other layers.
    kinds = {(x.in_features, x.dtype) for x in linears}
    inputs = {(width, dtype): noise(rows, width).to(dtype) for width, dtype in kinds}
    start = time.perf_counter()
    for linear in linears:
        linear.product(inputs[linear.in_features, linear.dtype])
    return time.perf_counter() - start
