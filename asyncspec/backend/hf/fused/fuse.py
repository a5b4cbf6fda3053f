"""Lean layers as two graphs each, where that computes the same.

The functions of a graph round otherwise than a family's own code. So a fused layer is held to the
lean one, which had the family's bits: over rows of noise its numbers are the same but for rounding,
and those of a row have the same bits alone and among others.
"""

from __future__ import annotations

import torch
from torch import nn

from asyncspec.backend.hf.attention import Tree
from asyncspec.backend.hf.fused.activation import Activation, close, known_activation
from asyncspec.backend.hf.fused.halves import After, Before
from asyncspec.backend.hf.give_back import Freed
from asyncspec.backend.hf.graph import GraphError
from asyncspec.backend.hf.lean.body import LeanBody
from asyncspec.backend.hf.lean.fit import Listening
from asyncspec.backend.hf.lean.layer import LeanBlock, LeanLayer
from asyncspec.backend.hf.lean.rotary import Turns
from asyncspec.backend.hf.noise import noise

_CLOSE = 2e-5
"""Of the largest number: ordinary rounding of float32 sums."""


class FusedLayer(nn.Module):
    """What a lean layer computes. Raises ``GraphError``."""

    def __init__(
        self, layer: LeanLayer, block: LeanBlock, turned: int, activation: Activation
    ) -> None:
        super().__init__()
        self.before = Before(layer, turned)
        self.after = After(layer, block, activation)
        self._asked, self._width = layer.attention.asked, layer.attention.width

    @property
    def weight_bytes(self) -> int:
        """Memory of both graphs' weights, in bytes."""
        return self.before.weight_bytes + self.after.weight_bytes

    def forward(self, hidden: torch.Tensor, turns: Turns, tree: Tree) -> torch.Tensor:
        """Hidden states [1, n, H] -> [1, n, H]."""
        shape = (hidden.shape[1], -1, self._width)
        heads = [part.view(shape).transpose(0, 1) for part in self.before.heads(hidden, turns)]
        mixed = tree.attend(self._asked, *heads)
        return self.after.hidden(mixed.flatten(1).unsqueeze(0), hidden)


def fuse(body: LeanBody, width: int, positions: torch.Tensor) -> None:
    """Exchange the layers of ``body``, of ``width`` hidden numbers, whose weights lie in a file,
    where the fused ones compute the same of rows at these ``positions`` [n]."""
    hidden = noise(1, len(positions), width)
    turns = body.turns(hidden, positions.unsqueeze(0))
    known: dict[str, Activation | None] = {}
    freed = Freed()
    for i, layer in enumerate(body.layers):
        assert isinstance(layer, LeanLayer)
        fused = _fused(layer, turns[i][0].shape[-1], known)
        if fused is not None and _does_the_same(fused, layer, hidden, turns[i]):
            body.layers[i] = fused
            # Packing leaves as much behind as it packs.
            freed.add(fused.weight_bytes)


def _fused(layer: LeanLayer, turned: int, known: dict[str, Activation | None]) -> FusedLayer | None:
    block = layer.block
    if not isinstance(block, LeanBlock):
        return None
    name = repr(block.activation)
    if name not in known:
        known[name] = known_activation(block.activation)
    activation = known[name]
    try:
        return None if activation is None else FusedLayer(layer, block, turned, activation)
    except GraphError:
        return None


def _does_the_same(fused: FusedLayer, layer: LeanLayer, hidden: torch.Tensor, turns: Turns) -> bool:
    try:
        got = _heard(fused, hidden, turns)
        alone = _heard(fused, hidden[:, :1], Turns(x[:1] for x in turns))
    except GraphError:
        return False
    want = _heard(layer, hidden, turns)
    if not all(close(*pair, _CLOSE) for pair in zip(got, want, strict=True)):
        return False
    return all(torch.equal(x, among[..., :1, :]) for x, among in zip(alone, got, strict=True))


def _heard(layer: LeanLayer | FusedLayer, hidden: torch.Tensor, turns: Turns) -> list[torch.Tensor]:
    """Query, key and value [heads, n, D] and result [1, n, H] of a layer."""
    tree = Listening(hidden.shape[1])
    out = layer(hidden, turns, tree)
    return [*tree.heard, out]
