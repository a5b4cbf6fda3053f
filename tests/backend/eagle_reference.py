"""EAGLE heads without a cache: every path computed from its first row, by the formulas alone, in
float64, or in float32 to see what rounding does to the formulas themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import linear, silu

from asyncspec.core.tree import Grown, Shape
from asyncspec.source.expand import Proposal, beam, path_grower
from backend.eagle_heads import Sizes, State


class PlainHead:
    """A head from its tensors; ``embedding`` and ``lm_head`` are the target's."""

    def __init__(
        self,
        state: State,
        embedding: torch.Tensor,
        lm_head: torch.Tensor,
        sizes: Sizes | None = None,
        theta: float = 10_000.0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.dtype = dtype
        self.state = {name: tensor.to(dtype) for name, tensor in state.items()}
        self.third = "norm.weight" in state
        later = (f"layers.{i}." for i in range(1, (sizes or Sizes()).layers))
        self.layers = ("midlayer." if self.third else "layers.0.", *later)
        self.embedding = self.state.get("embed_tokens.weight", embedding.to(dtype))
        self.lm_head = self.state.get("lm_head.weight", lm_head.to(dtype))
        self.ids = torch.arange(len(self.lm_head)) + state.get("d2t", torch.tensor(0))
        self.sizes = sizes or Sizes()
        self.theta = theta
        self.norm_before_residual = False
        self.norm_output = False
        # Columns of a head that are rotated.
        self.rotary = self.sizes.head_dim

    def log_probs(
        self, features: torch.Tensor, tokens: Sequence[int], path: Sequence[int]
    ) -> torch.Tensor:
        """Log-probabilities after ``path``, which follows ``tokens``; ``features`` [n, ...] are
        the target's before each of ``tokens``."""
        rows = features.to(self.dtype)
        if self.third:
            rows = linear(self._normed_features(rows), self.state["fc.weight"])
        seen = list(tokens)
        guess = self.guesses(rows, seen)[-1]
        for token in path:
            fed_back = self._norm(guess, "norm") if self.norm_output else guess
            rows = torch.cat([rows, fed_back[None]])
            seen.append(token)
            guess = self.guesses(rows, seen)[-1]
        feature = self._norm(guess, "norm") if self.third else guess
        return linear(feature, self.lm_head).log_softmax(-1)

    def grow(
        self,
        features: torch.Tensor,
        tokens: Sequence[int],
        depth: int,
        width: int,
        count: int,
    ) -> Grown:
        """EAGLE-2's tree."""

        def successors(path: tuple[int, ...], width: int) -> Proposal:
            best = self.log_probs(features, tokens, list(path)).topk(width)
            return self.ids[best.indices].tolist(), best.values.tolist()

        return beam(path_grower(successors), Shape(depth, width, count))

    def guesses(self, features: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """One full causal pass."""
        embedded, first = self.embedding[torch.tensor(tokens)], self.layers[0]
        if self.third:
            normed = self._norm(features, first + "hidden_norm")
            residual = normed if self.norm_before_residual else features
            x = torch.cat([self._norm(embedded, first + "input_layernorm"), normed], -1)
        else:
            x = self._linear(torch.cat([embedded, features], -1), "fc")
            residual = x
        hidden = self._layer(first, x, residual)
        for layer in self.layers[1:]:
            hidden = self._layer(layer, self._norm(hidden, layer + "input_layernorm"), hidden)
        return hidden

    def _normed_features(self, features: torch.Tensor) -> torch.Tensor:
        if "input_norm.weight" in self.state:
            return self._norm(features, "input_norm")
        if "fc_norm.0.weight" not in self.state:
            return features
        depths = features.chunk(features.shape[-1] // len(self.state["fc_norm.0.weight"]), -1)
        return torch.cat([self._norm(x, f"fc_norm.{i}") for i, x in enumerate(depths)], -1)

    def _layer(self, layer: str, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        h = residual + self._attention(layer, x)
        y = self._norm(h, layer + "post_attention_layernorm")
        gate, up = (self._linear(y, f"{layer}mlp.{name}_proj") for name in ("gate", "up"))
        return h + self._linear(silu(gate) * up, layer + "mlp.down_proj")

    def _attention(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        sizes, rows = self.sizes, len(x)
        query, key, value = (
            self._linear(x, f"{layer}self_attn.{name}_proj").view(rows, -1, sizes.head_dim)
            for name in ("q", "k", "v")
        )
        if f"{layer}self_attn.q_norm.weight" in self.state:
            query = self._norm(query, f"{layer}self_attn.q_norm")
            key = self._norm(key, f"{layer}self_attn.k_norm")
        query, key = self._rotate(query), self._rotate(key)
        groups = sizes.heads // sizes.kv_heads
        key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * sizes.head_dim**-0.5
        later = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, value)
        return self._linear(mixed.flatten(1), f"{layer}self_attn.o_proj")

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Row i turns by i; columns j and j + half are one complex number."""
        x, rest = x[..., : self.rotary], x[..., self.rotary :]
        rows, _, width = x.shape
        speeds = self.theta ** -(torch.arange(0, width, 2).to(self.dtype) / width)
        angles = torch.outer(torch.arange(rows).to(self.dtype), speeds)
        turns = torch.polar(torch.ones_like(angles), angles)
        turned = torch.complex(*x.chunk(2, -1)) * turns[:, None]
        return torch.cat([turned.real, turned.imag, rest], -1)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, self.state[f"{name}.weight"], self.state.get(f"{name}.bias"))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * self.state[f"{name}.weight"]
