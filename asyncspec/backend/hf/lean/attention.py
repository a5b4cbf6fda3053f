"""A layer's attention without detours: products, norms, turns, the tree, the last product."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from asyncspec.backend.hf.attention import Asked, Tree
from asyncspec.backend.hf.lean.norm import lean_norm
from asyncspec.backend.hf.lean.rotary import Turns, turn


class LeanAttention(nn.Module):
    """Grouped-query attention with the linear layers and norms of a family's module. Raises
    ``AttributeError`` where it has other parts."""

    def __init__(self, family: Any, asked: Asked) -> None:
        super().__init__()
        fused = getattr(family, "qkv_proj", None)
        parts = [family.q_proj, family.k_proj, family.v_proj] if fused is None else [fused]
        self.inputs = nn.ModuleList(parts)
        self.o_proj = family.o_proj
        self.asked = asked
        self.width = width = family.head_dim
        config = family.config
        queries, keys = config.num_attention_heads * width, config.num_key_value_heads * width
        self.sizes = [queries, keys, keys]
        self.turns = getattr(family, "use_rope", True)
        self.clip = getattr(config, "clip_qkv", None)
        self.norms = nn.ModuleList()
        # Some families norm all heads as one row, others each.
        self.norms_heads = False
        if getattr(family, "q_norm", None) is not None:
            self.norms.extend(map(lean_norm, (family.q_norm, family.k_norm)))
            self.norms_heads = len(family.q_norm.weight) == width != queries

    def forward(self, x: torch.Tensor, turns: Turns, tree: Tree) -> torch.Tensor:
        """Hidden states [1, n, H] -> [1, n, H]."""
        query, key, value = self._heads(x)
        if self.turns:
            # Together: what few rows take is mostly a matter of how many operations there are.
            sizes = query.shape[1], key.shape[1]
            turned = turn(torch.cat([query, key], 1), turns)
            query, key = turned.split_with_sizes(sizes, 1)
        heads = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        out = tree.attend(self.asked, *heads)
        mixed: torch.Tensor = self.o_proj.forward(out.flatten(1).unsqueeze(0))
        return mixed

    def _heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value [n, heads, D]."""
        products = [part.forward(x) for part in self.inputs]
        if len(products) == 1:
            products = products[0].split_with_sizes(self.sizes, -1)
        if self.norms and not self.norms_heads:
            self._norm(products)
        if self.clip is not None:
            products = [part.clamp(-self.clip, self.clip) for part in products]
        query, key, value = products
        shape = (x.shape[1], -1, self.width)
        heads = [query.view(shape), key.view(shape), value.view(shape)]
        if self.norms_heads:
            self._norm(heads)
        return heads[0], heads[1], heads[2]

    def _norm(self, parts: list[torch.Tensor]) -> None:
        """Queries and keys, in place of what they were."""
        for i, norm in enumerate(self.norms):
            parts[i] = norm.forward(parts[i])
