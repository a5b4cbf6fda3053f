"""Linear layers whose every output row depends on its input row alone, to the last bit.

oneDNN's prepacked product gives the same bits for 2 to 1024 rows; only one row takes another path
(a matrix-vector kernel), so one row is doubled. It is also 2 to 3 times faster than torch's own in
float32. The operators are the ones torch's inductor freezes weights with; they are private, so
their absence is handled, and the self-test checks the loaded weights.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from asyncspec.backend.hf.recipe import Recipe

# Row count the packed layout is tuned for; any other works.
_PACK_HINT = 16


class RowLinear(nn.Module):
    """``x @ weight.T + bias`` for x [..., K], computed on at least ``min_rows`` rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.min_rows = recipe.min_rows
        # Read by some model code (Gemma checks it); the packed layout hides the real one.
        self.dtype = weight.dtype
        self.packed = recipe.packed and can_pack()
        self._bias = bias
        self._weight = _pack(weight) if self.packed else weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N]."""
        rows = x.numel() // self.in_features
        if rows >= self.min_rows:
            return self.product(x)
        flat = x.reshape(rows, self.in_features)
        padded = torch.cat([flat, flat[-1:].expand(self.min_rows - rows, -1)])
        return self.product(padded)[:rows].view(*x.shape[:-1], self.out_features)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """As ``forward``, without the row floor."""
        if not self.packed:
            return torch.nn.functional.linear(x, self._weight, self._bias)
        y = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")
        return cast("torch.Tensor", y)


def can_pack() -> bool:
    """Whether this torch has the private operators and oneDNN."""
    return (
        bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_HINT)
    return cast("torch.Tensor", packed)


def swap_linears(model: nn.Module, recipe: Recipe) -> list[RowLinear]:
    """Replace every ``nn.Linear`` in place, one after another, freeing each dense weight."""
    # Names, not modules: a list of modules would keep every dense weight to the end.
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    return [_swap(model, name, recipe) for name in names]


def _swap(model: nn.Module, name: str, recipe: Recipe) -> RowLinear:
    parent, _, attribute = name.rpartition(".")
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    bias = None if linear.bias is None else linear.bias.detach()
    swapped = RowLinear(linear.weight.detach(), bias, recipe)
    setattr(model.get_submodule(parent), attribute, swapped)
    return swapped
