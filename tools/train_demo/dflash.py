"""A DFlash head with DSpark's Markov head: a small decoder that fills in blocks of mask tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from .eagle import Mlp, Norm

if TYPE_CHECKING:
    from .recipe import Block, Shape


@dataclass(frozen=True)
class BlockSize:
    """What a head takes over from its target, and what it is itself."""

    shape: Shape
    block: Block
    vocab: int
    mask_token: int
    rope_theta: float
    eps: float


class Attention(nn.Module):
    """Rows of blocks over the text before their block, which is made of features, and their own
    block; queries and keys are normed head by head (Qwen3)."""

    def __init__(self, size: BlockSize):
        super().__init__()
        shape = size.shape
        self.width, self.theta = shape.hidden // shape.heads, size.rope_theta
        self.groups = shape.heads // shape.kv_heads
        kv = shape.kv_heads * self.width
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.q_norm = Norm(self.width, size.eps)
        self.k_norm = Norm(self.width, size.eps)

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """x [texts, blocks, rows, hidden], context [texts, length, hidden], anchors [texts,
        blocks]: positions of the blocks' first rows -> as x."""
        texts, blocks, rows, _ = x.shape
        places = anchors[..., None] + torch.arange(rows, device=x.device)
        query = self._heads(self.q_norm, self.q_proj(x), places)
        own = self._repeat(self._heads(self.k_norm, self.k_proj(x), places))
        value = self._repeat(self._split(self.v_proj(x)))
        before = torch.arange(context.shape[1], device=x.device)
        keys = self._repeat(self._heads(self.k_norm, self.k_proj(context), before))
        values = self._repeat(self._split(self.v_proj(context)))
        scale = self.width**-0.5
        with torch.autocast(x.device.type, enabled=False):
            query = query * scale
            hidden = before >= anchors[:, None, :, None, None]
            far = (query.flatten(2, 3) @ keys.mT).view(*query.shape[:-1], -1)
            near = query @ own.mT
            scores = torch.cat([far.masked_fill(hidden, float("-inf")), near], dim=-1)
            weights, length = scores.softmax(-1), len(before)
            mixed = (weights[..., :length].flatten(2, 3) @ values).view_as(query)
            mixed = mixed + weights[..., length:] @ value
        out: torch.Tensor = self.o_proj(mixed.movedim(1, 3).reshape(texts, blocks, rows, -1))
        return out

    def _heads(self, norm: Norm, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """x [texts, ..., heads * width] as [texts, heads, ..., width], normed and rotated."""
        half = self.width // 2
        steps = torch.arange(half, device=x.device, dtype=torch.float32) / half
        angles = places[..., None] * self.theta**-steps
        if places.ndim > 1:
            angles = angles[:, None]
        cos, sin = angles.cos(), angles.sin()
        y = norm(self._split(x))
        a, b = y[..., :half], y[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], -1, self.width).movedim(-2, 1)

    def _repeat(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(self.groups, 1)


class Layer(nn.Module):
    """A Qwen3 layer."""

    def __init__(self, size: BlockSize):
        super().__init__()
        hidden = size.shape.hidden
        self.self_attn = Attention(size)
        self.mlp = Mlp(hidden, size.shape.ffn)
        self.input_layernorm = Norm(hidden, size.eps)
        self.post_attention_layernorm = Norm(hidden, size.eps)

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """See ``Attention``."""
        x = x + self.self_attn(self.input_layernorm(x), context, anchors)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class MarkovHead(nn.Module):
    """What the token before adds to the logits, of low rank."""

    def __init__(self, vocab: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, before: torch.Tensor) -> torch.Tensor:
        """Tokens [...] -> [..., vocab]."""
        out: torch.Tensor = self.markov_w2(self.markov_w1(before))
        return out


class DFlashHead(nn.Module):
    """Row i of a block proposes the token after position i; names of tensors as published.

    Embedding and output matrix are the target's own.
    """

    def __init__(self, size: BlockSize, embedding: torch.Tensor):
        super().__init__()
        hidden, block = size.shape.hidden, size.block
        self.size = size
        self.embedding = nn.Buffer(embedding, persistent=False)
        self.fc = nn.Linear(len(block.depths) * embedding.shape[1], hidden, bias=False)
        self.hidden_norm = Norm(hidden, size.eps)
        self.layers = nn.ModuleList([Layer(size) for _ in range(size.shape.layers)])
        self.norm = Norm(hidden, size.eps)
        self.markov_head = MarkovHead(size.vocab, block.markov_rank)

    def forward(
        self, tokens: torch.Tensor, features: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """Rows [texts, blocks, rows, hidden], normed, of the blocks at ``anchors`` [texts, blocks]
        of the texts ``tokens`` [texts, length] with ``features`` [texts, length, depths * hidden].
        A block reads its first token and the features before it."""
        context = self.hidden_norm(self.fc(features))
        ids = torch.full((*anchors.shape, self.size.block.rows), self.size.mask_token)
        ids = ids.to(tokens.device)
        ids[..., 0] = tokens.gather(1, anchors)
        x = self.embedding[ids]
        for layer in self.layers:
            x = layer(x, context, anchors)
        out: torch.Tensor = self.norm(x)
        return out
