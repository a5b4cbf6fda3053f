"""Parts that the heads share, in tensors named as published."""

from __future__ import annotations

from typing import NamedTuple

import torch
from msgspec import Struct
from torch import nn
from torch.nn import functional


class HeadShape(Struct, frozen=True):
    """Sizes of a head's layers."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    layers: int
    # Base of the rotary embedding.
    rope_theta: float = 10_000.0
    eps: float = 1e-6

    @property
    def width(self) -> int:
        """Columns of an attention head."""
        return self.hidden // self.heads


def shape_for(hidden: int, layers: int) -> HeadShape:
    """A head as wide as its target. Raises ``ValueError`` for an odd width, which cannot be
    rotated."""
    width = next((w for w in (128, 64, 32, 16, 8, 4, 2) if hidden % w == 0 and w * 4 <= hidden), 0)
    if not width:
        raise ValueError(f"a hidden size of {hidden}")
    heads = hidden // width
    groups = next((g for g in (4, 3, 2) if heads % g == 0 and heads > g), 1)
    return HeadShape(hidden, heads, heads // groups, -(-8 * hidden // 96) * 32, layers)


class Guess(NamedTuple):
    """What a head guesses at one depth, from rows that are the same at all depths."""

    # What the output matrix reads [texts, rows, hidden].
    states: torch.Tensor
    # Positions [texts, rows] whose next token is guessed.
    positions: torch.Tensor
    # What is added to the logits [texts, rows, vocabulary].
    bias: torch.Tensor | None = None


class Norm(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] in float32."""
        return functional.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)


class Mlp(nn.Module):
    """SiLU-gated feed-forward block."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., hidden]."""
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Projections(nn.Module):
    """Queries, keys and values of grouped-query attention, and the way back. ``columns``: of what
    it reads; ``normed``: queries and keys are normed, head by head (Qwen3)."""

    def __init__(self, shape: HeadShape, columns: int, *, normed: bool) -> None:
        super().__init__()
        self.width, self.theta = shape.width, shape.rope_theta
        self.groups = shape.heads // shape.kv_heads
        kv = shape.kv_heads * shape.width
        self.q_proj = nn.Linear(columns, shape.hidden, bias=False)
        self.k_proj = nn.Linear(columns, kv, bias=False)
        self.v_proj = nn.Linear(columns, kv, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.q_norm = Norm(shape.width, shape.eps) if normed else nn.Identity()
        self.k_norm = Norm(shape.width, shape.eps) if normed else nn.Identity()

    def query(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """x [texts, ..., columns] at positions ``places``, broadcast over all but the last two
        dimensions of the result: [texts, heads, ..., width], rotated and scaled."""
        query = self._rotated(self.q_norm(self._split(self.q_proj(x))), places)
        scaled: torch.Tensor = query * self.width**-0.5
        return scaled

    def key_value(self, x: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys, and values, repeated to the number of query heads."""
        key = self._rotated(self.k_norm(self._split(self.k_proj(x))), places)
        value = self._split(self.v_proj(x))
        return key.repeat_interleave(self.groups, 1), value.repeat_interleave(self.groups, 1)

    def merge(self, mixed: torch.Tensor) -> torch.Tensor:
        """[texts, heads, ..., width] -> [texts, ..., hidden]."""
        out: torch.Tensor = self.o_proj(mixed.movedim(1, -2).flatten(-2))
        return out

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], -1, self.width).movedim(-2, 1)

    def _rotated(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        half = self.width // 2
        steps = torch.arange(half, device=x.device, dtype=torch.float32) / half
        angles = places[..., None] * self.theta**-steps
        if places.ndim > 1:
            angles = angles[:, None]
        cos, sin = angles.cos(), angles.sin()
        a, b = x[..., :half].float(), x[..., half:].float()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
