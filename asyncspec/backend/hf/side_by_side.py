"""Rows of several sessions in one pass: linear layers see them all, attention each its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from asyncspec.backend.hf.attention import TreeAttention


class Attends(Protocol):
    """The attention of one pass, layer by layer."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """See ``TreeAttention``."""


class SideBySide:
    """The rows of each of ``trees``, one after another, over its own cache."""

    def __init__(self, trees: Sequence[TreeAttention]) -> None:
        self._trees = trees
        self._counts = [len(tree.rows) for tree in trees]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """See ``TreeAttention``."""
        own = (torch.split(states, self._counts, dim=1) for states in (query, key, value))
        mixed = [
            tree.attend(layer, *states, scaling, window, softcap)
            for tree, *states in zip(self._trees, *own, strict=True)
        ]
        return torch.cat(mixed)


def side_by_side(trees: Sequence[TreeAttention]) -> Attends:
    """The attention of a pass over the rows of ``trees``; of one tree, that tree's own."""
    return trees[0] if len(trees) == 1 else SideBySide(trees)
