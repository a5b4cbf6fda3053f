"""Latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1) over a tree cache.

A slot holds the latent and the rotated key that all heads share, instead of every head's keys and
values. The matrix that would expand latents goes into queries and results (section 2.1.2), so all
heads read one key of ``rank`` + ``rope`` columns, whose first ``rank`` are the value too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.hf.attention.attention import (
    NO_MASK,
    AttentionParams,
    TreeMask,
    row_products,
)
from asyncspec.plugins.hf.attention.cache import LayerShape
from asyncspec.plugins.hf.kernels.device import Device
from asyncspec.plugins.hf.kernels.probing import PROBE_ROWS, noise, same_up_to_rounding


def latent_shape(attention: Any) -> LayerShape:
    """Shape of transformers' latent attention."""
    rank = attention.kv_lora_rank
    heads = attention.config.num_attention_heads
    return LayerShape(1, rank + attention.qk_rope_head_dim, rank, heads)


class Expansion(nn.Module):
    """The matrix [heads * (nope + V), rank] that expands latents, neither packed nor quantised."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, latents: Tensor) -> Tensor:
        """As the family applies it."""
        return nn.functional.linear(latents, self.weight)


def keep_expansions(model: nn.Module) -> None:
    """Before weights are loaded: take the expanding matrices from the linear layers."""
    for module in list(model.modules()):
        family: Any = module
        if isinstance(getattr(family, "kv_b_proj", None), nn.Linear):
            family.kv_b_proj = Expansion(family.kv_b_proj.weight)
            if hasattr(family, "indexer"):
                family.indexer = _AllTokens()


class _AllTokens(nn.Module):
    """In place of an indexer, which chooses the tokens that a row attends to (DeepSeek-V3.2): all,
    as contexts are no longer than what it chooses (``context_length``)."""

    def forward(self, *_: Any, **_named: Any) -> None:
        return None


class LatentAttention(nn.Module):
    """Made of the modules of ``family``, a layer's attention. Raises ``AttributeError`` where it
    has others."""

    def __init__(self, family: Any, layer: int, device: Device) -> None:
        super().__init__()
        self.layer_idx = layer
        self._device = device
        self._heads = family.config.num_attention_heads
        self._sizes = (family.qk_nope_head_dim, family.qk_rope_head_dim)
        self._latent_sizes = (family.kv_lora_rank, family.qk_rope_head_dim)
        self._scaling = float(family.scaling)
        indexed = hasattr(family, "indexer")
        self._interleaved = indexed or bool(getattr(family.config, "rope_interleave", False))
        # GLM-5 hands the choice of tokens from layer to layer.
        self._rest = (None, None) if hasattr(family, "skip_topk") else (None,)
        low = family.q_lora_rank is not None
        names = ("q_a_proj", "q_a_layernorm", "q_b_proj") if low else ("q_proj",)
        self._query = nn.Sequential(*(getattr(family, name) for name in names))
        self._compress = family.kv_a_proj_with_mqa
        self._norm = family.kv_a_layernorm
        self._output = family.o_proj
        by_head = family.kv_b_proj.weight.detach().view(self._heads, -1, family.kv_lora_rank)
        keys, values = by_head.split_with_sizes([self._sizes[0], family.v_head_dim], 1)
        # Right sides of products by rows: [heads, rank, nope] and [heads, V, rank].
        self.keys = nn.Parameter(keys.transpose(1, 2).contiguous(), requires_grad=False)
        self.values = nn.Parameter(values.contiguous(), requires_grad=False)

    def forward(
        self,
        hidden_states: Tensor,
        tree: TreeMask,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **_: Any,
    ) -> tuple[Tensor | None, ...]:
        """Hidden states [1, n, H] -> [1, n, H]."""
        rows = hidden_states[0]
        query = self._query(rows).view(len(rows), self._heads, -1).transpose(0, 1)
        plain, turned = query.split(self._sizes, -1)
        latent, shared = self._compress(rows).split(self._latent_sizes, -1)
        latent = self._norm(latent)
        if position_embeddings is not None:  # Kimi Linear has none
            cos, sin = (part[0] for part in position_embeddings)
            turned, shared = (self._rotated(x, cos, sin) for x in (turned, shared))
        absorbed = self._product(tree, plain, self.keys)
        key = torch.cat([latent, shared], -1).unsqueeze(0)
        params = AttentionParams(self.layer_idx, self._scaling)
        read = tree.attend(params, torch.cat([absorbed, turned], -1), key, latent.unsqueeze(0))
        mixed = self._product(tree, read.transpose(0, 1), self.values)
        out: Tensor = self._output(mixed.transpose(0, 1).flatten(1))
        return out.unsqueeze(0), *self._rest

    def _product(self, tree: TreeMask, left: Tensor, right: Tensor) -> Tensor:
        """left [heads, n, K] times right [heads, m, K] -> [heads, n, m]."""
        return row_products(self._device, tree.tiles, left.contiguous(), right).to(left.dtype)

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [..., n, rope] by cos and sin [n, rope], whose halves are alike."""
        half = x.shape[-1] // 2
        cos, sin = cos[:, :half], sin[:, :half]
        a, b = x[..., :half], x[..., half:]
        if self._interleaved:
            a, b = x[..., ::2], x[..., 1::2]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def install_latent_attention(model: Any, device: Device) -> None:
    """Replace a model's latent attention, in place, once its weights are loaded. Raises
    ``CheckpointError`` where the family's own code computes something else."""
    body = model.model
    for i, layer in enumerate(body.layers):
        family: Any = getattr(layer, "self_attn", None)
        if not isinstance(getattr(family, "kv_b_proj", None), Expansion):
            continue
        name = type(family).__name__
        try:
            ours = LatentAttention(family, i, device)
            agrees = _agrees(ours, family, getattr(body, "rotary_emb", None), device)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{name} is not known: {error}") from error
        if not agrees:
            raise CheckpointError(f"{name} computes something else than is known")
        layer.self_attn = ours


def _agrees(ours: LatentAttention, family: Any, rotary: Any, device: Device) -> bool:
    """Whether both give the same on a short sequence, up to rounding."""
    compress = family.kv_a_proj_with_mqa
    hidden = device.put(noise(1, PROBE_ROWS, compress.in_features).to(family.kv_b_proj.weight))
    arguments: dict[str, Any] = {"attention_mask": None}
    if rotary is not None:
        turns = rotary(hidden, device.put(torch.arange(PROBE_ROWS)).unsqueeze(0))
        arguments["position_embeddings"] = turns
    if hasattr(family, "indexer"):
        arguments |= {"attention_mask": NO_MASK, "prev_topk_indices": False}
    want, got = (x(hidden, **arguments, tree=_Sequence(PROBE_ROWS))[0] for x in (family, ours))
    return same_up_to_rounding(got, want)


class _Sequence(TreeMask):
    """One sequence from its first row on."""

    def compute(self, params: AttentionParams, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = (query.float() @ key.float().mT) * params.scaling
        later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return (weights @ value.float()).to(query.dtype).transpose(0, 1)
