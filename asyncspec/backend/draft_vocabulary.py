"""Whether a draft model's tokens are the target's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from asyncspec.core.errors import CheckpointError

MAX_DIFFERENT = 128
"""Tokens that may mean different things, as in llama.cpp: reserved ones that one of two models of
a family has given names."""

MAX_SHARE = 16
"""At most one in so many, of small vocabularies."""


def differing_tokens(
    ours: Mapping[int, str], theirs: Mapping[int, str], target: Path, draft: Path
) -> tuple[int, ...]:
    """The draft's tokens, ascending, that are none of the target's or others. Verification is
    lossless whatever is drafted, so the rest may be. Raises ``CheckpointError`` where too many of
    the tokens that both have differ."""
    shared = ours.keys() & theirs.keys()
    different = sorted(token for token in shared if ours[token] != theirs[token])
    if not shared or len(different) > min(MAX_DIFFERENT, len(shared) // MAX_SHARE):
        first = f", the first being {ours[different[0]]!r}" if different else ""
        raise CheckpointError(
            f"tokenizer mismatch: {draft} and {target} disagree on {len(different)} "
            f"entries of their vocabularies{first}; use a draft model of the same family"
        )
    return tuple(sorted({*different, *(theirs.keys() - ours.keys())}))
