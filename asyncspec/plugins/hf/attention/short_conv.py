"""Short convolutions over a tree (LFM2): a node reads the last inputs of its path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from asyncspec.core.jobs import Row
from asyncspec.plugins.hf.attention.attention import TreeMask
from asyncspec.plugins.hf.attention.recurrent import StateCache, StateShape, convolved


def window_shape(family: Any) -> StateShape:
    """Shape of transformers' short convolution. Raises ``AttributeError`` for another kind."""
    convolution = family.conv
    (kernel,) = convolution.kernel_size
    return StateShape(0, 0, 0, convolution.in_channels, kernel, 0)


class ShortConvolution(nn.Module):
    """Made of the modules of ``family``, a layer's convolution with gates before and behind."""

    def __init__(self, family: Any, layer: int) -> None:
        super().__init__()
        self.layer_idx, self.shape = layer, window_shape(family)
        self.in_proj, self.conv, self.out_proj = family.in_proj, family.conv, family.out_proj

    def forward(self, hidden_states: Tensor, tree: TreeMask, **_: Any) -> Tensor:
        """Hidden states [1, n, H] -> [1, n, H]."""
        before, behind, inputs = self.in_proj(hidden_states).chunk(3, -1)
        mixed = tree.recur(self, (before * inputs)[0]).to(hidden_states.dtype)
        out: Tensor = self.out_proj(behind * mixed)
        return out

    def read(
        self, states: StateCache, committed: int, rows: Sequence[Row], *inputs: Tensor
    ) -> Tensor:
        """As ``RecurrentLayer``."""
        return convolved(states.windows(committed, rows, *inputs), self.conv)
