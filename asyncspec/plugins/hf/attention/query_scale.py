"""Queries that grow with their positions in layers without rotary embedding, as Llama 4's.

The family counts rows from the length of its cache on, which a tree has not; here their positions
decide.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from asyncspec.plugins.hf.kernels.cpu.elementwise import PaddedActivation


class QueryScale(nn.Module):
    """Factor of queries by position: 1 + ``scale`` * log(1 + floor((position + 1) / ``floor``))."""

    def __init__(self, floor: float, scale: float) -> None:
        super().__init__()
        self._floor, self._scale = floor, scale
        self._log1p = PaddedActivation(_Log1p())

    def forward(self, query: Tensor, positions: Tensor) -> Tensor:
        """query [1, H, n, K], positions [1, n] -> [1, H, n, K]."""
        steps = torch.floor((positions.float() + 1.0) / self._floor)
        factors = self._log1p(steps) * self._scale + 1.0
        scaled: Tensor = (query * factors[:, None, :, None]).to(query.dtype)
        return scaled


class _Log1p(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log1p(x)


def install_query_scales(model: Any) -> None:
    """Have the layers of a model that scale queries do so by their rows' positions, in place."""
    for layer in model.model.layers:
        attention: Any = getattr(layer, "self_attn", None)
        if not getattr(attention, "attn_temperature_tuning", False) or attention.use_rope:
            continue
        attention.attn_temperature_tuning = False
        attention.query_scale = QueryScale(attention.floor_scale, attention.attn_scale)
        layer.register_forward_pre_hook(_hand_on_positions, with_kwargs=True)


def _hand_on_positions(
    _layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Layers hand arguments that they do not know to attention."""
    return inputs, named | {"row_positions": named["position_ids"]}
