"""Two settings on the same prompts: how they compare, and how sure that is."""

from __future__ import annotations

import random
from collections.abc import Sequence

from msgspec import Struct

DRAWS = 2000
"""Resamples of a bootstrap."""


class Pair(Struct, frozen=True):
    """One prompt under both: tokens and turns of the one, and of the other."""

    tokens: float
    turns: float
    other_tokens: float
    other_turns: float


class Gain(Struct, frozen=True):
    """How much more tokens a turn the one makes: 0.05 is five percent more."""

    gain: float
    # 95 % of the resamples of the prompts lie between; None where a single prompt says nothing.
    between: tuple[float, float] | None = None


def compare(pairs: Sequence[Pair]) -> Gain:
    """Sums over all prompts first, then the ratio; a paired bootstrap over prompts. The same
    prompts give the same interval."""
    if len(pairs) < 2:
        return Gain(_gain(pairs))
    dice = random.Random(0)
    draws = sorted(_gain(dice.choices(pairs, k=len(pairs))) for _ in range(DRAWS))
    return Gain(_gain(pairs), (draws[DRAWS // 40], draws[-1 - DRAWS // 40]))


def _gain(pairs: Sequence[Pair]) -> float:
    ours = sum(pair.tokens for pair in pairs) / sum(pair.turns for pair in pairs)
    theirs = sum(pair.other_tokens for pair in pairs) / sum(pair.other_turns for pair in pairs)
    return ours / theirs - 1
