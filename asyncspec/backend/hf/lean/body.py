"""A model's layers from embedding to last norm, in place of a family's own loop over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from asyncspec.backend.hf.attention import Asked, Tree
from asyncspec.backend.hf.lean.layer import LeanLayer
from asyncspec.backend.hf.lean.norm import lean_norm
from asyncspec.backend.hf.lean.rotary import LeanRotary, Turns, has_kinds


class Output:
    """What a family's head reads of its body's result: the fields that the family's own result
    has, whatever this release of transformers calls them. To make one of transformers' own takes
    20 us instead of .3."""

    def __init__(self, last_hidden_state: torch.Tensor, others: Mapping[str, None]) -> None:
        self.__dict__.update(others)
        self.last_hidden_state = last_hidden_state


class LeanBody(nn.Module):
    """Made of the modules of a family's own body, of whose result ``result`` is an example. Raises
    ``AttributeError`` or ``TypeError`` where it has other modules, or a result of other kind."""

    def __init__(self, family: Any, asked: Sequence[Asked], result: Any) -> None:
        super().__init__()
        # Caches and the like, which nobody asks for: a head is tried without them (``fit.py``).
        self._others: dict[str, None] = dict.fromkeys(field.name for field in fields(result))
        self.embed_tokens = family.embed_tokens
        self.layers = nn.ModuleList(map(LeanLayer, family.layers, asked))
        self.norm = lean_norm(family.norm)
        self._scale = getattr(family, "embedding_multiplier", 1.0)
        typed = has_kinds(family.rotary_emb)
        kinds = [layer.self_attn.layer_type if typed else None for layer in family.layers]
        self._kinds: list[str | None] = kinds
        self._rotary = {kind: LeanRotary(family.rotary_emb, kind) for kind in kinds}

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        *,
        position_ids: torch.Tensor,
        tree: Tree,
        **_: Any,
    ) -> Output:
        """Tokens [1, n] or hidden states [1, n, H]; positions [1, n]."""
        hidden: Any = inputs_embeds if input_ids is None else self.embed_tokens(input_ids)
        if self._scale != 1:
            hidden = hidden * self._scale
        # Of a shortened shard there are more kinds than layers.
        for turns, layer in zip(self.turns(hidden, position_ids), self.layers, strict=False):
            hidden = layer(hidden, turns, tree)
        return Output(self.norm(hidden), self._others)

    def turns(self, hidden: torch.Tensor, positions: torch.Tensor) -> list[Turns]:
        """For each layer; positions [1, n]."""
        made = {kind: each.turns(hidden, positions) for kind, each in self._rotary.items()}
        return [made[kind] for kind in self._kinds]
