"""Dense weights as the product that this CPU does best."""

from __future__ import annotations

import math

import torch

from asyncspec.backend.hf.cpu import product_type, reads_half
from asyncspec.backend.hf.linear import RowLinear, RowwiseLinear
from asyncspec.backend.hf.mlas import MlasLinear, is_quickest
from asyncspec.backend.hf.recipe import Recipe
from asyncspec.backend.hf.widened import HalfLinear, WidenedLinear, magnitude


def kept_type(stored: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """The type in which a layer for rows of ``dtype`` keeps weights that are ``stored`` so."""
    half = stored == torch.float16 and dtype == torch.float32 and reads_half()
    return torch.float16 if half else dtype


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
