"""Element-wise functions that give an element the same bits wherever it lies in a tensor.

torch computes exp, tanh, cos and the like on vectors of elements and finishes a tensor whose size
is no multiple of the vector with a scalar routine that rounds differently, so bits depend on the
number of rows. Padding to a multiple makes every element a vector element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_VECTOR = 64
"""Elements; a multiple of what any CPU kernel of torch computes in one step."""


_GRAIN = 1 << 15
"""Most elements of a tensor that torch computes in one thread."""


def exp2_(x: Tensor) -> Tensor:
    """2 to the power of ``x``, a contiguous tensor of whole vectors, in place. It takes a third of
    the time of ``exp``, which is MKL's, on AMD's CPUs."""
    threads = torch.get_num_threads()
    if threads == 1 or x.numel() <= _GRAIN or x.device.type != "cpu":
        return x.exp2_()
    # Shares of threads are whole vectors too, which those of any number of elements are not.
    for part in torch.split(x.view(-1), _GRAIN * threads):
        for share in [part] if part.numel() == _GRAIN * threads else torch.split(part, _GRAIN):
            share.exp2_()
    return x


class PaddedActivation(nn.Module):
    """An activation function on a flat tensor padded to whole vectors."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Same shape out as in."""
        padding = -x.numel() % _VECTOR
        y: Tensor
        if not padding:
            y = self.function(x.contiguous())
            return y
        y = self.function(torch.cat([x.reshape(-1), x.new_zeros(padding)]))
        return y[: x.numel()].view(x.shape)


_FUNCTIONAL = ("Lfm2MLP", "Lfm2MoeMLP")
"""Feed-forward layers that have their activation as a function."""


class PaddedGate(nn.Module):
    """LFM2's feed-forward layer."""

    def __init__(self, family: Any) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = family.w1, family.w2, family.w3
        self.activation = PaddedActivation(nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]."""
        out: Tensor = self.w2(self.activation(self.w1(x)) * self.w3(x))
        return out


class Function(nn.Module):
    """An activation function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Same shape out as in."""
        return self.function(x)


class Exp(nn.Module):
    """As a module."""

    def forward(self, x: Tensor) -> Tensor:
        """Same shape out as in."""
        return x.exp()


class PaddedRotary(nn.Module):
    """A rotary embedding for multiples of 32 positions: cos and sin are whole vectors."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(
        self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor] | Tensor:
        """position_ids [..., 1, n] -> cos, sin [1, n, head_dim], or in Llama 4 complex numbers."""
        rows = position_ids.shape[-1]
        padded = torch.nn.functional.pad(position_ids, (0, -rows % 32))
        turns = self.function(x, padded, *args, **kwargs)
        if isinstance(turns, Tensor):
            return turns[:, :rows]
        cos, sin = turns
        return cos[:, :rows], sin[:, :rows]


def pad_elementwise(model: nn.Module) -> None:
    """Wrap the activation functions and rotary embeddings of a model in place."""
    for parent in list(model.modules()):
        if isinstance(parent, PaddedActivation | PaddedRotary):
            continue
        for name, child in list(parent.named_children()):
            if name in ("act_fn", "activation_fn", "activation", "act"):
                setattr(parent, name, PaddedActivation(child))
            elif type(child).__name__ in _FUNCTIONAL:
                setattr(parent, name, PaddedGate(child))
            elif name.startswith("rotary_emb") or name == "pos_emb":
                setattr(parent, name, PaddedRotary(child))
