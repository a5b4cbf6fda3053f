"""An EAGLE head step by step: features and tokens in, trees out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncspec.backend.hf.eagle.source import EagleSource
from asyncspec.core.growth import Grown
from asyncspec.source.batch import run_cobatched
from asyncspec_protocol.ids import SessionId, Version
from asyncspec_protocol.messages import Expand, Expanded

ONE = SessionId(1)


def extend(
    source: EagleSource, features: torch.Tensor, tokens: Sequence[int], session: SessionId = ONE
) -> None:
    """Commit tokens, each with the features of the position before it."""
    run_cobatched([source.extend(session, features, tokens)], source.compute)


def grow(
    source: EagleSource, depth: int, width: int, count: int, session: SessionId = ONE
) -> Grown:
    """A tree below the session's tip."""
    known = source.known(session)
    tree = source.run(Expand(session, Version(0), known, (), depth, width, count))
    assert isinstance(tree, Expanded)
    return tree.parents, tree.tokens, tree.scores
