"""A decoder layer: attention and feed-forward block around the residual stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from asyncspec.backend.hf.attention import Asked, Tree
from asyncspec.backend.hf.lean.attention import LeanAttention
from asyncspec.backend.hf.lean.norm import lean_norm
from asyncspec.backend.hf.lean.rotary import Turns

_BEFORE, _AFTER = "input_layernorm", "post_attention_layernorm"
_BEFORE_BLOCK, _AFTER_BLOCK = "pre_feedforward_layernorm", "post_feedforward_layernorm"


class LeanLayer(nn.Module):
    """Norms stand where a family has them: before attention and block (Llama), after both (OLMo 2)
    or on all four sides (Gemma 2). Raises ``AttributeError`` where it has other parts."""

    def __init__(self, family: Any, asked: Asked) -> None:
        super().__init__()
        self.attention = LeanAttention(family.self_attn, asked)
        self.block = lean_block(family.mlp)
        self.scale = getattr(family, "residual_multiplier", 1.0)
        # With a norm after the block, ``post_attention_layernorm`` means what it says.
        after = hasattr(family, _AFTER_BLOCK)
        names = (
            (_BEFORE, _AFTER, _BEFORE_BLOCK, _AFTER_BLOCK) if after else (_BEFORE, "", _AFTER, "")
        )
        self.norms = nn.ModuleList(_norm(family, name) for name in names)

    def forward(self, hidden: torch.Tensor, turns: Turns, tree: Tree) -> torch.Tensor:
        """Hidden states [1, n, H] -> [1, n, H]."""
        # ``forward`` throughout: a module that is called looks for hooks, and only whole layers and
        # the last norm ever have any (``tapped.py``).
        before, after, before_block, after_block = self.norms
        out: torch.Tensor = after.forward(
            self.attention.forward(before.forward(hidden), turns, tree)
        )
        hidden = self._added(out, hidden)
        out = after_block.forward(self.block.forward(before_block.forward(hidden)))
        return self._added(out, hidden)

    def _added(self, out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """In place of ``out``, which nobody else has."""
        return (out if self.scale == 1 else out.mul_(self.scale)).add_(hidden)


class LeanBlock(nn.Module):
    """A gated feed-forward block."""

    def __init__(self, family: Any, activation: Any) -> None:
        super().__init__()
        fused = getattr(family, "gate_up_proj", None)
        parts = [family.gate_proj, family.up_proj] if fused is None else [fused]
        self.inputs = nn.ModuleList(parts)
        self.activation = activation
        self.down_proj = family.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [1, n, H] -> [1, n, H]."""
        products = [part.forward(x) for part in self.inputs]
        gate, up = products if len(products) == 2 else products[0].chunk(2, -1)
        out: torch.Tensor = self.down_proj.forward(self.activation(gate).mul_(up))
        return out


def lean_block(family: Any) -> nn.Module:
    """A family's block; itself where it is something else, as with experts."""
    for name in ("act_fn", "activation_fn"):
        if hasattr(family, name) and isinstance(getattr(family, "down_proj", None), nn.Module):
            return LeanBlock(family, getattr(family, name))
    return family  # type: ignore[no-any-return]


def _norm(family: Any, name: str) -> nn.Module:
    module = getattr(family, name, None)
    return nn.Identity() if module is None else lean_norm(module)
