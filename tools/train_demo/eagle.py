"""An EAGLE-1/2 head: one decoder layer that guesses the target's next feature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from .attention import plain_attention

if TYPE_CHECKING:
    from .recipe import Shape

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class HeadSize:
    """What a head takes over from its target."""

    shape: Shape
    vocab: int
    rope_theta: float
    eps: float


class Norm(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalised `x` in float32."""
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Grouped-query attention; queries, keys and values are made apart from attending."""

    def __init__(self, shape: Shape, theta: float):
        super().__init__()
        self.width = shape.hidden // shape.heads
        self.groups = shape.heads // shape.kv_heads
        self.theta = theta
        kv = shape.kv_heads * self.width
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def query(self, x: torch.Tensor) -> torch.Tensor:
        """Rotated queries [rows, heads, length, width] of x [rows, length, hidden]."""
        return self._rotate(self._heads(self.q_proj(x)))

    def key_value(self, x: torch.Tensor) -> Pair:
        """Rotated keys and values, repeated to the number of query heads."""
        key = self._rotate(self._heads(self.k_proj(x)))
        value = self._heads(self.v_proj(x))
        return key.repeat_interleave(self.groups, 1), value.repeat_interleave(self.groups, 1)

    def merge(self, mixed: torch.Tensor) -> torch.Tensor:
        """Back from heads to [rows, length, hidden]."""
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, self.width).transpose(1, 2)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """RoPE; row i sits at position i (not i + 1, as in the published heads)."""
        half = self.width // 2
        steps = torch.arange(half, device=x.device, dtype=torch.float32) / half
        angles = torch.outer(torch.arange(x.shape[2], device=x.device), self.theta**-steps)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Mlp(nn.Module):
    """SiLU-gated feed-forward block."""

    def __init__(self, hidden: int, ffn: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As in Llama."""
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """A Llama layer without its input norm, as EAGLE has it."""

    def __init__(self, size: HeadSize):
        super().__init__()
        self.self_attn = Attention(size.shape, size.rope_theta)
        self.mlp = Mlp(size.shape.hidden, size.shape.ffn)
        self.post_attention_layernorm = Norm(size.shape.hidden, size.eps)

    def finish(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Residuals and feed-forward after attention."""
        h = x + self.self_attn.merge(mixed)
        out: torch.Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return out


class EagleHead(nn.Module):
    """Row i sees token i + 1 and feature i, and guesses feature i + 1; keys as published."""

    def __init__(self, size: HeadSize):
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocab, size.shape.hidden)
        self.fc = nn.Linear(2 * size.shape.hidden, size.shape.hidden)
        self.layers = nn.ModuleList([Layer(size)])
        self.embed_tokens.weight.requires_grad_(False)  # the target's own

    def forward(self, tokens: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, Pair]:
        """Guesses [rows, length, hidden] one step ahead, and the keys and values they used.

        `tokens` [rows, length] are one position later than `features` [rows, length, hidden].
        """
        x = self._input(tokens, features)
        layer = self._layer()
        key, value = layer.self_attn.key_value(x)
        query = layer.self_attn.query(x)
        mixed = plain_attention(query, key, value, layer.self_attn.width**-0.5)
        return layer.finish(x, mixed), (key, value)

    def again(self, tokens: torch.Tensor, guesses: torch.Tensor, context: Pair) -> torch.Tensor:
        """One step further, on guessed features, as when drafting the second level of a tree.

        `guesses` stand in for the features of each row itself; all rows before it are those of
        the first pass (`context`), because there the target has already spoken.
        """
        x = self._input(tokens, guesses)
        layer = self._layer()
        query, (key, value) = layer.self_attn.query(x), layer.self_attn.key_value(x)
        scores = query @ context[0].mT
        itself = (query * key).sum(-1, keepdim=True)
        earlier = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).tril(-1)
        scores = torch.cat([scores.masked_fill(~earlier, float("-inf")), itself], dim=-1)
        weights = (scores.float() * layer.self_attn.width**-0.5).softmax(-1).to(value.dtype)
        mixed = weights[..., :-1] @ context[1] + weights[..., -1:] * value
        return layer.finish(x, mixed)

    def _input(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        embedded = self.embed_tokens(tokens)
        out: torch.Tensor = self.fc(torch.cat([embedded, features.to(embedded.dtype)], dim=-1))
        return out

    def _layer(self) -> Layer:
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer
