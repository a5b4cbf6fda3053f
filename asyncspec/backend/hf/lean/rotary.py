"""Rotary position embedding, with what all layers need of it made once for many passes."""

from __future__ import annotations

import inspect
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


class Turns(tuple[torch.Tensor, torch.Tensor]):
    """cos and sin [n, 1, R] as ``turn`` takes them."""

    @cached_property
    def halves(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """cos and sin [n, R / 2] as onnxruntime takes them, made once for all layers: both halves
        of a head have the same angles, and of the second one sin has its own sign."""
        cos, sin = (x.squeeze(1).chunk(2, -1)[1].contiguous().numpy() for x in self)
        return cos, sin


WINDOW = 256
"""Positions that are made at a time; a multiple of what ``WholeRotary`` asks for."""

_ALIGNED = 64


class LeanRotary:
    """A family's rotary embedding for layers of one kind (Gemma 3 has two). Passes ask for
    neighbouring positions, so a window of them is kept; its numbers are those of any other."""

    def __init__(self, family: Any, kind: str | None) -> None:
        self._family = family
        self._kind = () if kind is None else (kind,)
        self._start = self._end = 0
        self._table = torch.empty(0)

    def turns(self, hidden: torch.Tensor, positions: torch.Tensor) -> Turns:
        """Of positions [1, n], in the type of ``hidden`` or as the family makes them."""
        low, high = (int(x) for x in positions.aminmax())
        if not self._start <= low <= high < self._end:
            if high - low >= WINDOW - _ALIGNED:
                return signed(*self._family(hidden, positions, *self._kind))
            self._start = low // _ALIGNED * _ALIGNED
            self._end = self._start + WINDOW
            window = torch.arange(self._start, self._end).unsqueeze(0)
            made = signed(*self._family(hidden, window, *self._kind))
            self._table = torch.stack(made, 1)
        cos, sin = self._table.index_select(0, positions[0] - self._start).unbind(1)
        return Turns((cos, sin))


def has_kinds(family: Any) -> bool:
    """Whether a rotary embedding turns layers of different types differently."""
    inmost = getattr(family, "function", family)  # without what it was wrapped in
    return "layer_type" in inspect.signature(inmost.forward).parameters


def signed(cos: torch.Tensor, sin: torch.Tensor) -> Turns:
    """Of a family's cos and sin [1, n, R], the first half of sin with its sign turned: (-x) * s and
    x * (-s) are the same number, and rows need not be negated in every layer."""
    first, second = sin[0].unsqueeze(1).chunk(2, -1)
    return Turns((cos[0].unsqueeze(1), torch.cat([-first, second], -1)))


def turn(x: torch.Tensor, turns: Turns) -> torch.Tensor:
    """x [n, H, D] -> [n, H, D]; of a family that turns R < D numbers of a head the first R are."""
    cos, sin = turns
    width = cos.shape[-1]
    if width < x.shape[-1]:
        head, rest = x.split_with_sizes([width, x.shape[-1] - width], -1)
        return torch.cat([turn(head, turns), rest], -1)
    out = (x * cos).add_(torch.roll(x, width // 2, -1) * sin)
    # OLMo 2 turns bfloat16 rows in float32.
    return out if out.dtype == x.dtype else out.to(x.dtype)
