"""An EAGLE-3 head in training: one layer that reads some depths of the target, then its own guesses
(arXiv:2503.01840, section 3.2, training-time test)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from asyncspec.plugins.hf.training.batches import Batch
from asyncspec.plugins.hf.training.layers import Guess, HeadShape, Mlp, Norm, Projections

Pair = tuple[torch.Tensor, torch.Tensor]


class Layer(nn.Module):
    """A Llama layer whose attention reads token and feature side by side."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.hidden_norm = Norm(shape.hidden, shape.eps)
        self.self_attn = Projections(shape, 2 * shape.hidden, normed=False)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.mlp = Mlp(shape)

    def forward(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        places: torch.Tensor,
        passes: list[Pair],
    ) -> torch.Tensor:
        """[texts, rows, hidden] one depth further. ``passes``: keys and values of the depths above,
        to which those of this one are added. A row sees the first depth up to itself, and of later
        ones only itself: they are its own path in a tree."""
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(features)], dim=-1)
        query = self.self_attn.query(x, places)
        passes.append(self.self_attn.key_value(x, places))
        with torch.autocast(x.device.type, enabled=False):
            query = query.float()
            (first, first_values), *path = ((k.float(), v.float()) for k, v in passes)
            scores = query @ first.mT
            future = torch.full(scores.shape[-2:], float("-inf"), device=x.device).triu(1)
            path_scores = [(query * key).sum(-1, keepdim=True) for key, _ in path]
            weights = torch.cat([scores + future, *path_scores], dim=-1).softmax(-1)
            rows = first.shape[-2]
            mixed = weights[..., :rows] @ first_values
            for i, (_, value) in enumerate(path):
                mixed = mixed + weights[..., rows + i, None] * value
        hidden = features + self.self_attn.merge(mixed)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Head(nn.Module):
    """Row i sees the feature of position i and the token after it, and guesses the token after
    that. Embedding and output matrix are the target's. ``width``: columns of a feature row."""

    def __init__(self, shape: HeadShape, width: int, depth: int) -> None:
        super().__init__()
        self.shape, self.depth = shape, depth
        self.fc = nn.Linear(width, shape.hidden, bias=False)
        self.layers = nn.ModuleList([Layer(shape)])
        self.norm = Norm(shape.hidden, shape.eps)

    def guesses(self, batch: Batch, embedding: torch.Tensor, *, spread: bool) -> Iterator[Guess]:
        """See ``Guess``: a row for every token but the last ones."""
        count = batch.tokens.shape[1] - self.depth
        features = self.fc(batch.features[:, :count]).float()
        passes: list[Pair] = []
        rows = torch.arange(count, device=features.device)
        for depth in range(1, self.depth + 1):
            embedded = embedding[batch.tokens[:, depth : depth + count]]
            features = self.layers[0](embedded, features, rows + depth - 1, passes)
            yield Guess(self.norm(features), (rows + depth).expand(len(batch.tokens), -1))
