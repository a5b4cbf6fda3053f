"""What two opinions on the next token come to: a mixture whose errors are learned. Pure.

For one node a *base* (a draft model) gives a distribution, and an *aside* (n-gram lookup) a few
tokens with the probabilities it gives them. Before anything is known the two count alike. From then
on it is counted how many of the aside's tokens came true, and how many were expected to: once for
those that repeat the base's first choice and once for the others, because an aside that is right
where both say the same may well be wrong wherever they differ. The odds of what it says are
corrected by what was counted, so scores stay probabilities, comparable over the whole tree: what
an aside pushes out of the tree was less likely than what it puts there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.source.grow import NOTHING, Proposal

PRIOR = 4.0
"""Proposals' worth of belief that as many come true as are expected to."""

CERTAIN = 0.999
"""No guess is surer: odds stay finite, and of what the base says something is left."""


class Record(Struct, frozen=True):
    """What became of an aside's tokens: how many there were, came true, and were expected to."""

    seen: float = 0.0
    true: float = 0.0
    expected: float = 0.0

    def corrected(self, chance: float) -> float:
        """A token's ``chance`` in the light of what was counted."""
        chance = min(chance, CERTAIN)
        half = PRIOR / 2
        odds = chance / (1 - chance)
        odds *= (self.true + half) / (self.expected + half)
        odds *= (self.seen - self.expected + half) / (self.seen - self.true + half)
        return odds / (1 + odds)

    def counted(self, chance: float, *, true: bool) -> Record:
        """With one token more, whose chance was thought to be ``chance``."""
        return Record(self.seen + 1, self.true + true, self.expected + min(chance, CERTAIN))


class Trust(Struct, frozen=True):
    """What is known of one aside. Frozen: learning gives another."""

    # Of tokens that are the base's first choice too.
    same: Record = Record()
    # Of all others.
    other: Record = Record()

    def learn(self, base: Proposal, aside: Proposal, token: int) -> Trust:
        """After ``token`` became certain where both had their say."""
        same, other = self.same, self.other
        for proposed, chance, agreed in _chances(base, aside):
            if agreed:
                same = same.counted(chance, true=proposed == token)
            else:
                other = other.counted(chance, true=proposed == token)
        return replace(self, same=same, other=other)


def mix(base: Proposal, aside: Proposal, trust: Trust, width: int) -> Proposal:
    """The ``width`` likeliest tokens of both, best first; of one where the other is silent."""
    if not len(base[0]) or not len(aside[0]):
        said = base if len(base[0]) else aside
        return said[0][:width], said[1][:width]
    said = {
        token: (trust.same if agreed else trust.other).corrected(chance)
        for token, chance, agreed in _chances(base, aside)
    }
    total = sum(said.values())
    scale = min(1.0, CERTAIN / total) if total else 1.0
    kept = probabilities(base)
    told = sum(kept.get(token, 0.0) for token in said)
    left = (1 - total * scale) / max(1 - told, 1 - CERTAIN)
    mixed = {token: chance * left for token, chance in kept.items()}
    mixed |= {token: chance * scale for token, chance in said.items()}
    best = sorted((t for t in mixed if mixed[t]), key=mixed.__getitem__, reverse=True)[:width]
    return (best, [min(0.0, math.log(mixed[t])) for t in best]) if best else NOTHING


def probabilities(proposal: Proposal) -> dict[int, float]:
    """By token; what cannot come is left out."""
    return {
        token: math.exp(log_prob)
        for token, log_prob in zip(*proposal, strict=True)
        if log_prob > float("-inf")
    }


def _chances(base: Proposal, aside: Proposal) -> Iterator[tuple[int, float, bool]]:
    """The aside's tokens, each with its chance where both count alike, and whether it is the base's
    first choice. What the aside leaves open it leaves to the base. None where the base is silent:
    then there is nothing to compare with.
    """
    if not len(base[0]):
        return
    kept, said = probabilities(base), probabilities(aside)
    unsure = max(0.0, 1 - sum(said.values()))
    for token, chance in said.items():
        own = kept.get(token, 0.0)
        yield token, (own + chance + unsure * own) / 2, token == base[0][0]
