"""The one decoder layer of an EAGLE head, over a tree cache.

Its attention is wider at the entrance than a model's own (EAGLE-3) and its norms are elsewhere, so
no model class of transformers fits; only the rotary embedding is taken from there.
"""

from __future__ import annotations

from typing import Any

import torch

from asyncspec.backend.hf.attention import Asked, Tree
from asyncspec.backend.hf.eagle.geometry import Geometry
from asyncspec.backend.hf.eagle.weights import Weights
from asyncspec.backend.hf.lean.rotary import signed, turn
from asyncspec.backend.hf.linear import with_rows
from asyncspec.errors import CheckpointError


class HeadLayer:
    """Grouped-query attention, then a gated feed-forward block."""

    def __init__(self, weights: Weights) -> None:
        self._heads = weights.geometry.heads
        self._kv_heads = weights.geometry.kv_heads
        self._rotary = _rotary(weights.geometry)
        self._activation = _activation(weights.geometry)
        self._query = weights.of_layer("self_attn.q_proj")
        self._key = weights.of_layer("self_attn.k_proj")
        self._value = weights.of_layer("self_attn.v_proj")
        self._output = weights.of_layer("self_attn.o_proj")
        self._norm = weights.norm_of_layer("post_attention_layernorm")
        self._gate = weights.of_layer("mlp.gate_proj")
        self._up = weights.of_layer("mlp.up_proj")
        self._down = weights.of_layer("mlp.down_proj")

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        tree: Tree,
    ) -> torch.Tensor:
        """x [n, what attention takes], residual [n, H], positions [n] -> [n, H]."""
        count, rows = len(x), self._query.padded(len(x))
        x, residual, positions = (with_rows(part, rows) for part in (x, residual, positions))
        hidden = residual + self._attend(x, positions, tree)
        normed = self._norm(hidden)
        gated = self._activation(self._gate(normed)) * self._up(normed)
        out: torch.Tensor = hidden + self._down(gated)
        return out[:count]

    def _attend(self, x: torch.Tensor, positions: torch.Tensor, tree: Tree) -> torch.Tensor:
        rows = len(x)
        query = self._query(x).view(rows, self._heads, -1)
        key = self._key(x).view(rows, self._kv_heads, -1)
        value = self._value(x).view(rows, self._kv_heads, -1)
        turns = signed(*self._rotary(x, positions.unsqueeze(0)))
        query, key = turn(query, turns), turn(key, turns)
        asked = Asked(layer=0, scaling=float(query.shape[-1]) ** -0.5)
        heads = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        mixed = tree.attend(asked, *heads)
        out: torch.Tensor = self._output(mixed.flatten(1))
        return out


def _rotary(geometry: Geometry) -> Any:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    try:
        # Only a head's width matters; the sizes of some EAGLE heads a Llama would refuse.
        config = LlamaConfig(
            hidden_size=geometry.head_dim,
            num_attention_heads=1,
            head_dim=geometry.head_dim,
            max_position_embeddings=geometry.context_length,
            rope_parameters=geometry.rope,
        )
        return LlamaRotaryEmbedding(config)
    except Exception as error:  # a setting that makes no sense may fail in any way
        raise CheckpointError(f"the EAGLE head's rope_scaling is incomplete: {error}") from error


def _activation(geometry: Geometry) -> Any:
    from transformers.activations import ACT2FN

    if geometry.activation not in ACT2FN:
        raise CheckpointError(
            f"the EAGLE head's hidden_act {geometry.activation!r} is unknown; most heads have silu"
        )
    return ACT2FN[geometry.activation]
