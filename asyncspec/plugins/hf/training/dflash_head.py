"""A DFlash head with DSpark's Markov head in training: a small decoder that fills in blocks of mask
tokens (arXiv:2602.06036)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from asyncspec.plugins.hf.training.batches import Batch
from asyncspec.plugins.hf.training.layers import Guess, HeadShape, Mlp, Norm, Projections

SPACING = 8
"""Tokens for each of which a block is taught."""


class Layer(nn.Module):
    """A Qwen3 layer. Rows of blocks see the text before their block, which is made of features, and
    their own block."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.self_attn = Projections(shape, shape.hidden, normed=True)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """x [texts, blocks, rows, hidden], context [texts, length, hidden], anchors [texts,
        blocks]: positions of the blocks' first rows -> as x."""
        x = x + self._attend(self.input_layernorm(x), context, anchors)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def _attend(
        self, x: torch.Tensor, context: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        places = anchors[..., None] + torch.arange(x.shape[2], device=x.device)
        places_before = torch.arange(context.shape[1], device=x.device)
        query = self.self_attn.query(x, places)
        block_keys, block_values = self.self_attn.key_value(x, places)
        keys, values = self.self_attn.key_value(context, places_before)
        with torch.autocast(x.device.type, enabled=False):
            query = query.float()
            hidden = places_before >= anchors[:, None, :, None, None]
            far = (query.flatten(2, 3) @ keys.float().mT).view(*query.shape[:-1], -1)
            near = query @ block_keys.float().mT
            scores = torch.cat([far.masked_fill(hidden, float("-inf")), near], dim=-1)
            weights, length = scores.softmax(-1), len(places_before)
            mixed = (weights[..., :length].flatten(2, 3) @ values.float()).view_as(query)
            mixed = mixed + weights[..., length:] @ block_values.float()
        return self.self_attn.merge(mixed)


class MarkovHead(nn.Module):
    """What the token before adds to the logits, of low rank."""

    def __init__(self, vocab: int, proposed: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, proposed, bias=False)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, previous: torch.Tensor) -> torch.Tensor:
        """Tokens [...] -> [..., proposed]."""
        out: torch.Tensor = self.markov_w2(self.markov_w1(previous))
        return out


class DFlashHead(nn.Module):
    """Row i of a block proposes the token after position i. Embedding and output matrix are the
    target's.

    Arguments:
        shape: of its layers.
        width: columns of a feature row.
        depth: rows of a block, each of which proposes a token.
        vocab: the target's tokens, and how many of them it proposes.
        mask_token: stands where a token is not known.
        markov_rank: of the bias that the token before gives.
    """

    def __init__(
        self,
        shape: HeadShape,
        width: int,
        depth: int,
        *,
        vocab: tuple[int, int],
        mask_token: int,
        markov_rank: int,
    ) -> None:
        super().__init__()
        self.shape, self.depth, self.mask_token = shape, depth, mask_token
        self.fc = nn.Linear(width, shape.hidden, bias=False)
        self.hidden_norm = Norm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList([Layer(shape) for _ in range(shape.layers)])
        self.norm = Norm(shape.hidden, shape.eps)
        self.markov_head = MarkovHead(*vocab, markov_rank)

    def guesses(self, batch: Batch, embedding: torch.Tensor, *, spread: bool) -> Iterator[Guess]:
        """See ``Guess``: a row for each block, at random places or ``spread`` at even distances.
        Each depth knows the text's own token before it."""
        anchors = self._anchors(batch, spread=spread)
        context = self.hidden_norm(self.fc(batch.features))
        ids = torch.full((*anchors.shape, self.depth), self.mask_token, device=anchors.device)
        ids[..., 0] = batch.tokens.gather(1, anchors)
        x = embedding[ids].float()
        for layer in self.layers:
            x = layer(x, context, anchors)
        states = self.norm(x)
        for row in range(self.depth):
            positions = anchors + row
            bias = self.markov_head(batch.tokens.gather(1, positions))
            yield Guess(states[:, :, row], positions, bias)

    def _anchors(self, batch: Batch, *, spread: bool) -> torch.Tensor:
        """Not the first token, before which there is no feature."""
        texts, length = batch.tokens.shape
        device = batch.tokens.device
        last = length - self.depth + 1
        if spread:
            return torch.arange(1, last, SPACING, device=device).expand(texts, -1)
        generator = torch.Generator().manual_seed(batch.seed)
        places = torch.rand(texts, last - 1, generator=generator)
        return places.topk(max(1, (last - 1) // SPACING), dim=1).indices.to(device) + 1
