"""Dense weights as the product that this CPU does best."""

from __future__ import annotations

import math

import torch

from asyncspec.backend.hf.checkpoint import stored_type
from asyncspec.backend.hf.cpu import product_type, reads_half
from asyncspec.backend.hf.linear import RowLinear, RowwiseLinear
from asyncspec.backend.hf.mapped import can_map
from asyncspec.backend.hf.mlas import MlasLinear, is_quickest
from asyncspec.backend.hf.recipe import Recipe
from asyncspec.backend.hf.weights import TensorInfo
from asyncspec.backend.hf.widened import HalfLinear, WidenedLinear, magnitude

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
