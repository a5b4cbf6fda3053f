"""Passes of several sessions as one: linear layers see all rows, attention each session's slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from asyncspec.backend.hf.attention import Tree, TreeAttention


class TogetherAttention(Tree):
    """The rows of several sessions, one after the other, each with its own cache. Every session's
    rows get the very computation they would get alone, so they get the same bits."""

    def __init__(self, parts: Sequence[TreeAttention]) -> None:
        super().__init__(sum(part.count for part in parts))
        self.parts = parts

    def mix(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """See ``Tree``; n are the rows of all sessions."""
        found = [
            part.mix(layer, query[:, own], key[:, own], value[:, own], scaling, window, softcap)
            for part, own in zip(self.parts, slices(self.parts), strict=True)
        ]
        return torch.cat(found)


def slices(parts: Sequence[TreeAttention]) -> Iterator[slice]:
    """Where each session's rows are."""
    start = 0
    for part in parts:
        end = start + part.count
        yield slice(start, end)
        start = end
