"""Kimi Delta Attention over a tree (Kimi Linear, arXiv:2510.26692, section 3): a gated delta net
with a decay for each number of a key in place of one for each head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asyncspec.plugins.hf.attention.delta_net import DeltaNet, normalized
from asyncspec.plugins.hf.attention.recurrent import Inputs, StateShape, convolved


def kimi_shape(family: Any) -> StateShape:
    """Shape of transformers' layer. Raises ``AttributeError`` for another kind."""
    heads, width = family.num_heads, family.head_dim
    return StateShape(
        heads=heads,
        key_width=width,
        value_width=width,
        channels=family.conv_dim,
        kernel=family.conv_kernel_size,
        key_heads=heads,
        decays=width,
    )


class KimiDelta(DeltaNet):
    """Made of the modules of ``family``. Raises ``AttributeError`` where it has others."""

    def __init__(self, family: Any, layer: int) -> None:
        super().__init__(family, layer, kimi_shape(family), "o_norm", "o_proj")

    def _products(self, x: Tensor) -> tuple[Tensor, ...]:
        family, forget = self.family, self.family.forget_gate
        channels = torch.cat(
            [part(x) for part in (family.q_proj, family.k_proj, family.v_proj)], -1
        )
        gate = family.g_b_proj(family.g_a_proj(x))
        return channels, gate, family.b_proj(x), forget.f_b_proj(forget.f_a_proj(x))

    def _heads(
        self, windows: Tensor, strength: Tensor, step_size: Tensor
    ) -> tuple[Tensor, list[Inputs]]:
        family, shape, count = self.family, self.shape, len(windows)
        forget = family.forget_gate
        mixed = convolved(windows, family.conv1d)
        # Rounded where the family rounds.
        mixed = self._activation(mixed.to(strength.dtype)).float()
        query, key, value = (part.reshape(count, shape.heads, -1) for part in mixed.chunk(3, -1))
        query, key = normalized(query) * shape.key_width**-0.5, normalized(key)
        rate = self._softplus(step_size.float() + forget.dt_bias.float())
        rate = rate.view(count, shape.heads, -1) * forget.A_log.float().exp().view(-1, 1)
        each = zip(key, value, self._exp(-rate), self._sigmoid(strength).float(), strict=True)
        return query, [Inputs(*(part.clone() for part in parts)) for parts in each]
