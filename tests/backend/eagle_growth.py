"""An EAGLE head step by step: features and tokens in, trees out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncspec.core.jobs import Feed, TensorRows
from asyncspec.core.tree import Grown
from asyncspec.plugins.hf.heads.dflash.source import DFlashSource
from asyncspec.plugins.hf.heads.eagle.source import EagleSource
from asyncspec_protocol.ids import SessionId, Version
from asyncspec_protocol.messages import Expand, Expanded

ONE = SessionId(1)


def extend(
    source: EagleSource | DFlashSource,
    features: torch.Tensor,
    tokens: Sequence[int],
    session: SessionId = ONE,
) -> None:
    """Commit tokens, each with the features of the position before it."""
    known = source.known(session)
    if len(features):
        rows = TensorRows(features, tuple(range(len(features))))
        source.run(Feed(session, max(known - 1, 0), (rows,)))
    # The first token of a session has no position before it.
    committed = tuple(tokens) if known else (0, *tokens)
    source.run(Expand(session, Version(0), known, committed, depth=1, width=1, count=0))


def grow(
    source: EagleSource | DFlashSource, depth: int, width: int, count: int, session: SessionId = ONE
) -> Grown:
    """A tree below the session's tip."""
    known = source.known(session)
    tree = source.run(Expand(session, Version(0), known, (), depth, width, count))
    assert isinstance(tree, Expanded)
    return tree.parents, tree.tokens, tree.scores
