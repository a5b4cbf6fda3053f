"""Numbers in 8 bits with a scale for every 32 of them, as llama.cpp's q8_0 keeps them.

A row's levels depend on its own numbers alone, and a level times its scale is exact in float32:
what is read has the same bits wherever the row lies.
"""

from __future__ import annotations

from fractions import Fraction
from math import prod

import torch
from torch import Tensor

GROUP = 32
"""Numbers that share a scale."""

NUMBER_BYTES = Fraction(GROUP + 2, GROUP)
"""Bytes of a number and its share of a scale."""

_LARGEST = 127

_MAX_SCALE = torch.finfo(torch.float16).max


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Levels [..., n] (int8) and scales [..., n / 32] (float16) of x [..., n]."""
    groups = _by_group(x.float())
    scales = groups.abs().amax(-1) / _LARGEST
    scales = scales.clamp_(max=_MAX_SCALE).half()
    # Groups of numbers too small for a scale are zeros.
    levels = groups / scales.float().masked_fill(scales == 0, torch.inf).unsqueeze(-1)
    levels = levels.round_().clamp_(-_LARGEST, _LARGEST)
    return levels.to(torch.int8).flatten(-2), scales


def dequantize(levels: Tensor, scales: Tensor, out: Tensor) -> None:
    """Set ``out`` [..., n], float32, to what ``quantized`` has rounded."""
    # A product of different types would make a copy of all levels first.
    by_group = _by_group(out)
    by_group.copy_(_by_group(levels)).mul_(scales.float().unsqueeze(-1))


def _by_group(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], -1, GROUP)


class Scratch:
    """Memory that a pass expands layers into, one after another: the system takes longer to give
    megabytes than a pass to fill them. What was taken for the same use is overwritten."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, use: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """A tensor of any numbers."""
        size, key = prod(shape), (use, dtype)
        if key not in self._held or self._held[key].numel() < size:
            self._held.pop(key, None)
            self._held[key] = torch.empty(size, dtype=dtype, device=self._device)
        return self._held[key][:size].view(shape)
