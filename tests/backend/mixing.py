"""A stand-in for attention, to see what layers do around it."""

from __future__ import annotations

import torch

from asyncspec.backend.hf.attention import Asked, Tree


class Mixing(Tree):
    """Attention that is none, but shows a change in anything it is given."""

    def mix(
        self, asked: Asked, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        groups = query.shape[0] // key.shape[0]
        weight = asked.scaling + (asked.layer + 1) / 8
        weight += (asked.window or 0) / 256 + (asked.softcap or 0) / 512
        mixed = query * weight + (key + value.cumsum(1)).repeat_interleave(groups, 0)
        return mixed.transpose(0, 1)
