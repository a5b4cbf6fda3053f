"""Passes of several sessions as one: linear layers see all rows, attention each session's slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from asyncspec.backend.hf.attention import Asked, Tree, TreeAttention


class TogetherAttention(Tree):
    """The rows of several sessions, one after the other, each with its own cache. Every session's
    rows get the very computation they would get alone, so they get the same bits."""

    def __init__(self, parts: Sequence[TreeAttention]) -> None:
        super().__init__(sum(part.count for part in parts))
        self.parts = parts

    def mix(
        self, asked: Asked, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See ``Tree``; n are the rows of all sessions."""
        found = [
            part.mix(asked, query[:, own], key[:, own], value[:, own])
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
