"""Whether a model's body may be lean: where its result has the family's bits.

The family's own code runs once over a few rows of noise, and tells what it asks of the tree
(scaling, window, cap); then the lean body does. A release of transformers that computes something
else keeps its own code, and takes longer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from asyncspec.backend.hf.attention import Asked, Tree
from asyncspec.backend.hf.lean.body import LeanBody


class Listening(Tree):
    """Instead of attention: remembers what layers give it, and answers with the queries."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.asked: list[Asked] = []
        self.heard: list[torch.Tensor] = []

    def mix(
        self, asked: Asked, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See ``Tree``."""
        self.asked.append(asked)
        self.heard += (query, key, value)
        return query.transpose(0, 1)

    def same(self, other: Listening) -> bool:
        """Whether both were given the same."""
        if self.asked != other.asked or len(self.heard) != len(other.heard):
            return False
        return all(map(torch.equal, self.heard, other.heard))


def make_lean(model: Any, run: Callable[[Tree], torch.Tensor], count: int) -> bool:
    """Exchange the body of a transformers causal LM where that changes no bit; whether it was.
    ``run`` is a pass of ``count`` rows of noise through it, over a given tree."""
    theirs, ours = Listening(count), Listening(count)
    want, family = run(theirs), model.model
    try:
        model.model = LeanBody(family, theirs.asked)
        if torch.equal(run(ours), want) and ours.same(theirs):
            return True
    except (AttributeError, TypeError, ValueError, RuntimeError):
        pass  # its parts are not those we know
    model.model = family
    return False
