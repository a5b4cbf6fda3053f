"""An embedding that stays in the type it is stored in."""

from __future__ import annotations

import torch
from torch import nn


class KeptEmbedding(nn.Module):
    """Rows of a matrix [vocab, H], each widened when it is asked for: that loses nothing, and to
    widen all of them would double their memory."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._dtype = dtype

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [...] -> [..., H]."""
        return nn.functional.embedding(tokens, self.weight).to(self._dtype)


def only_looks_up(embedding: nn.Module) -> bool:
    """Whether a family's embedding gives rows as they are: Gemma's scales them, in the type of its
    weights."""
    return type(embedding) is nn.Embedding
