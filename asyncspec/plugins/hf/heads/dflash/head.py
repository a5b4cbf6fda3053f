"""DFlash heads (arXiv:2602.06036): a small decoder that fills in a block of mask tokens at once.

Keys and values of the text before the block are made of the target's features; only the rows of
the block, a known token and mask tokens, go through the layers. Rows of a block see all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncspec.plugins.hf.attention.attention import AttentionParams, TreeMask
from asyncspec.plugins.hf.heads.draft_model import best_successors
from asyncspec.plugins.hf.heads.eagle.description import (
    MARKOV,
    MARKOV_GATE,
    BlockShape,
    HeadDescription,
    layer,
)
from asyncspec.plugins.hf.heads.eagle.head import HeadLayer, Weights, cache_shape, token_bytes
from asyncspec.plugins.hf.kernels.device import CPU, Device
from asyncspec.source.expand import Proposal

_MIN_GROWTH = 256
"""Positions."""


class Context:
    """Keys and values of a session's committed positions."""

    def __init__(self, head: HeadDescription, dtype: torch.dtype, device: Device = CPU) -> None:
        self.length = 0
        size = (head.num_hidden_layers, 2, head.num_key_value_heads, 0, head.head_dim)
        self._rows = torch.empty(size, dtype=dtype, device=device.torch)

    def append(self, rows: torch.Tensor) -> None:
        """rows [layers, 2, kv_heads, n, D]: keys and values of the next n positions."""
        end = self.length + rows.shape[3]
        if (room := self._rows.shape[3]) < end:
            size = [*self._rows.shape]
            size[3] = max(end, room + max(_MIN_GROWTH, room // 2))
            grown = self._rows.new_empty(size)
            grown[:, :, :, : self.length] = self._rows[:, :, :, : self.length]
            self._rows = grown
        self._rows[:, :, :, self.length : end] = rows
        self.length = end

    def before(self, index: int, start: int) -> torch.Tensor:
        """A layer's keys and values from position ``start`` on [2, kv_heads, n, D]."""
        return self._rows[index, :, :, start : self.length]


class BlockAttention(TreeMask):
    """Each block over its own session's text and itself."""

    def __init__(self, block: BlockShape, contexts: Sequence[Context], device: Device) -> None:
        super().__init__(block.rows * len(contexts))
        self._block = block
        self._contexts = contexts
        # Mask of a block whose rows do not see later ones.
        self._causal = device.put(torch.ones(block.rows, block.rows, dtype=torch.bool).tril())

    def compute(
        self, params: AttentionParams, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        window, rows = self._block.windows[params.layer], self._block.rows
        parts = []
        for i, context in enumerate(self._contexts):
            rows_of_block = slice(i * rows, (i + 1) * rows)
            start = max(0, context.length - window) if window else 0
            cached = context.before(params.layer, start)
            keys, values = torch.cat(
                [cached, torch.stack([key[:, rows_of_block], value[:, rows_of_block]])], dim=2
            )
            mask = None
            if window and self._block.causal:
                seen = self._causal.new_ones(rows, cached.shape[2])
                mask = torch.cat([seen, self._causal], dim=1)
            out = torch.nn.functional.scaled_dot_product_attention(
                query[None, :, rows_of_block],
                keys[None],
                values[None],
                attn_mask=mask,
                scale=params.scaling,
                enable_gqa=True,
            )
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)


class DFlashHead:
    """Position i of a block proposes the token at it (DSpark: after it), given the text before the
    block. DSpark's Markov head also looks at the token before; then proposals differ by path."""

    def __init__(self, weights: Weights) -> None:
        head = weights.description
        assert head.block is not None, "a head of another kind"
        self.block = block = head.block
        self._description = head
        self.features, self.dtype = head.features, weights.dtype
        self.vocab_size, self.draft_vocab_size = head.vocab_size, head.draft_vocab_size
        # Memory of a position.
        self.token_bytes = token_bytes(cache_shape(head, weights.dtype), self.features)
        self._embedding = weights.embedding()
        self._fuse = weights.linear("fc")
        self._norm_context = weights.norm("hidden_norm")
        self.device = weights.device
        indexes, turned = range(head.num_hidden_layers), weights.rotary()
        self._norms = [weights.norm(f"{layer(index)}input_layernorm") for index in indexes]
        self._layers = [HeadLayer(weights, index, turned) for index in indexes]
        self._final_norm = weights.norm("norm")
        self._lm_head = weights.lm_head()
        self._ids = weights.ids
        if block.markov:
            self._previous = weights.table(f"{MARKOV}w1")
            self._bias = weights.linear(f"{MARKOV}w2")
        if block.markov == "gated":
            self._gate = weights.linear(MARKOV_GATE)

    def new_context(self) -> Context:
        """The context of a session without a position."""
        return Context(self._description, self.dtype, self.device)

    def context_rows(self, features: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Features [n, F] of positions [n] as ``Context`` keeps them: [layers, 2, kv_heads, n,
        D]."""
        fused = self._norm_context(self._fuse(features.to(self.dtype)))
        each = (torch.stack(one.keys_values(fused, positions)) for one in self._layers)
        return torch.stack([*each]).transpose(2, 3)

    def fill(self, contexts: Sequence[Context], tokens: Sequence[int]) -> torch.Tensor:
        """One pass: for each context the token behind it, and what the rows that propose come to,
        [blocks, levels, H]."""
        block = self.block
        ids = torch.full((len(tokens), block.rows), block.mask_token)
        ids[:, 0] = torch.tensor(tokens)
        starts = torch.tensor([context.length for context in contexts])
        positions = (starts[:, None] + torch.arange(block.rows)).flatten()
        positions, ids = self.device.put(positions), self.device.put(ids)
        attention = BlockAttention(block, contexts, self.device)
        hidden = self._embedding(ids.flatten())
        for norm, decoder_layer in zip(self._norms, self._layers, strict=True):
            hidden = decoder_layer.forward(norm(hidden), hidden, positions, attention)
        return self._final_norm(hidden).view(len(tokens), block.rows, -1)[:, -block.levels :]

    def proposals(
        self, rows: torch.Tensor, previous: Sequence[int] | None, count: int
    ) -> list[Proposal]:
        """Proposals for rows [n, H] of blocks, each behind a token, which only DSpark looks at."""
        logits = self._lm_head(rows)
        if self.block.markov:
            embedded = self._previous(self.device.integers(previous or ()))
            if self.block.markov == "gated":
                embedded = embedded * self._gate(torch.cat([rows, embedded], dim=-1)).sigmoid()
            logits = logits + self._bias(embedded)
        return best_successors(logits, count, self._ids)
