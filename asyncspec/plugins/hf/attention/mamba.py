"""Mamba-2 layers over a tree (Transformers are SSMs, arXiv:2405.21060, section 7), with the states
of ``recurrent.py`` in place of a family's scan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from asyncspec.core.jobs import Row
from asyncspec.plugins.hf.attention.attention import TreeMask
from asyncspec.plugins.hf.attention.recurrent import Inputs, StateCache, StateShape, convolved
from asyncspec.plugins.hf.kernels.cpu.elementwise import Exp, PaddedActivation
from asyncspec.plugins.hf.kernels.cpu.linear import pad_rows

_VECTOR = 64
"""Elements; the gated norm's activation runs over whole vectors of them (``elementwise.py``)."""


def mamba_shape(family: Any) -> StateShape:
    """Shape of transformers' Mamba-2 layer. Raises ``AttributeError`` for another kind."""
    return StateShape(
        heads=family.num_heads,
        key_width=family.ssm_state_size,
        value_width=family.head_dim,
        channels=family.conv_dim,
        kernel=family.conv_kernel_size,
        key_heads=family.n_groups,
    )


class Mamba2(nn.Module):
    """Made of the modules of ``family``. Raises ``AttributeError`` where it has others."""

    def __init__(self, family: Any, layer: int) -> None:
        super().__init__()
        self.layer_idx, self.shape = layer, mamba_shape(family)
        self.family = family
        # transformers bounds the steps of several tokens at once, as here, but not of one alone.
        self._bounds: tuple[float, float] = family.time_step_limit
        self._activation, self._softplus, self._exp = (
            PaddedActivation(kind) for kind in (nn.SiLU(), nn.Softplus(), Exp())
        )
        if family.activation not in ("silu", "swish"):
            raise AttributeError(f"a convolution followed by {family.activation}")
        # Falcon-H1's multipliers, and no norm behind its gate.
        self._scale: float = getattr(family, "ssm_in_multiplier", 1.0)
        self._has_norm: bool = getattr(family, "mamba_rms_norm", True)
        self._inner: int = family.intermediate_size
        self._keys = self.shape.key_heads * self.shape.key_width

    def forward(self, hidden_states: Tensor, tree: TreeMask, **_: Any) -> Tensor:
        """Hidden states [1, n, H] -> [1, n, H]."""
        family, shape = self.family, self.shape
        sizes = (self._inner, shape.channels, shape.heads)
        scaled = hidden_states if self._scale == 1.0 else hidden_states * self._scale
        projected = family.in_proj(scaled)
        if hasattr(family, "mup_vector"):
            projected = projected * family.mup_vector
        gate, channels, step_size = projected[0].split(sizes, -1)
        read = tree.recur(self, channels, step_size).flatten(1)
        step = _VECTOR // math.gcd(self._inner, _VECTOR)
        padded = -(-len(read) // step) * step
        if self._has_norm:
            gated = family.norm(*(pad_rows(x, padded)[None].contiguous() for x in (read, gate)))
        else:
            gated = (read * self._activation(gate))[None]
        out: Tensor = family.out_proj(gated[:, : len(read)].to(hidden_states.dtype))
        return out

    def read(
        self, states: StateCache, committed: int, rows: Sequence[Row], *inputs: Tensor
    ) -> Tensor:
        """As ``RecurrentLayer``."""
        family, shape = self.family, self.shape
        channels, step_size = inputs
        mixed = convolved(states.windows(committed, rows, channels), family.conv1d)
        # Rounded where the family rounds.
        mixed = self._activation(mixed.to(channels.dtype)).float()
        value, key, query = mixed.split_with_sizes((self._inner, self._keys, self._keys), -1)
        value = value.reshape(len(rows), *shape.read)
        key, query = (x.reshape(len(rows), shape.key_heads, -1) for x in (key, query))
        step_size = self._softplus(step_size + family.dt_bias.to(step_size.dtype))
        step_size = step_size.clamp(*self._bounds).float()
        decay = self._exp(-family.A_log.float().exp() * step_size)
        each = zip(key, value * step_size[..., None], decay, strict=True)
        updates = [Inputs(*(part.clone() for part in parts)) for parts in each]
        query = query.repeat_interleave(shape.heads // shape.key_heads, 1)
        read = states.read(committed, rows, query, updates)
        out: Tensor = read + family.D.float()[:, None] * value
        return out
