"""A stand-in for attention, to see what layers do around it."""

from __future__ import annotations

import torch

from asyncspec.plugins.hf.attention.attention import AttentionParams, TreeMask


class Mixing(TreeMask):
    """Attention that is none, but shows a change in anything it is given."""

    def compute(
        self, params: AttentionParams, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        groups = query.shape[0] // key.shape[0]
        weight = params.scaling + (params.layer + 1) / 8
        weight += (params.window or 0) / 256 + (params.softcap or 0) / 512
        mixed = query * weight + (key + value.cumsum(1)).repeat_interleave(groups, 0)
        return mixed.transpose(0, 1)
