"""Dense weights as the product that this CPU does best."""

from __future__ import annotations

import torch

from asyncspec.backend.hf.cpu import product_type, reads_half
from asyncspec.backend.hf.linear import RowLinear, RowwiseLinear
from asyncspec.backend.hf.recipe import Recipe
from asyncspec.backend.hf.widened import HalfLinear, WidenedLinear


def dense_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe, *, shared: bool = False
) -> RowwiseLinear:
    """A linear layer of ``weight`` [N, K], in memory of its own unless ``shared``."""
    if product_type(weight.dtype) == weight.dtype:
        return RowLinear(weight, bias, recipe, shared=shared)
    # FBGEMM would make numbers of what is none.
    if reads_half() and not shared and bool(weight.isfinite().all()):
        return HalfLinear(weight, bias)
    return WidenedLinear(weight, bias, recipe, shared=shared)
