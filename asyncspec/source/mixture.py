"""Mixing what several sources propose for one node, with weights learned online.

For one node a *base* (a draft model) gives a distribution, and an *auxiliary* source (n-gram
lookup) a few tokens with chances. Initially the base weighs twice as much. Then the auxiliary's
tokens that came true are counted beside those expected to, for tokens that repeat the base's first
choice and for the others, since a source may be right only where both agree. The odds of its tokens
are corrected by these counts. So are those of the base's first choice where the auxiliary proposes
nothing, or an underconfident draft would lose its place to calibrated lookups; but only upwards.
Scores thus are chances, comparable over the whole tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.source.expand import NO_PROPOSAL, Proposal

PRIOR = 4.0
"""Weight, in proposals, of the belief that as many come true as are expected to."""

INITIAL_WEIGHT = 1 / 3
"""Weight of an auxiliary source: it proposes few tokens, the base all. With a half, mixtures were
right as often in greedy text, and at temperature 1 less often (docs/results/papers.md)."""

MAX_CHANCE = 0.999
"""Odds stay finite, and some of the base's probability is left."""

MIN_SUCCESSORS = 16
"""Asked of every source, however few are wanted: the base's probability of an auxiliary's token is
known only where the base lists it."""

T = TypeVar("T")

Path = tuple[int, ...]
"""Tokens below the tip."""


class Calibration(Struct, frozen=True):
    """How many tokens of one kind were proposed, came true, and were expected to."""

    seen: float = 0.0
    true: float = 0.0
    expected: float = 0.0

    def corrected(self, chance: float) -> float:
        """A token's ``chance``, its odds corrected by the counts."""
        chance = min(chance, MAX_CHANCE)
        half = PRIOR / 2
        odds = chance / (1 - chance)
        odds *= (self.true + half) / (self.expected + half)
        odds *= (self.seen - self.expected + half) / (self.seen - self.true + half)
        return odds / (1 + odds)

    def counted(self, chance: float, *, true: bool) -> Calibration:
        """With one token more, whose uncorrected chance was ``chance``."""
        return Calibration(self.seen + 1, self.true + true, self.expected + min(chance, MAX_CHANCE))


class MixtureWeight(Struct, frozen=True):
    """The counts of one auxiliary source."""

    # Tokens that are the base's first choice too.
    agreeing: Calibration = Calibration()
    # All other tokens of the auxiliary.
    differing: Calibration = Calibration()
    # The base's first choices where the auxiliary was silent.
    base_alone: Calibration = Calibration()

    def learn(self, base: Proposal, auxiliary: Proposal, token: int) -> MixtureWeight:
        """After ``token`` came true where these were proposed."""
        if not len(base[0]):
            return self
        if not len(auxiliary[0]):
            first, chance = base[0][0], math.exp(base[1][0])
            return replace(self, base_alone=self.base_alone.counted(chance, true=first == token))
        counts = {True: self.agreeing, False: self.differing}
        for proposed, chance, agrees in _chances(base, auxiliary):
            counts[agrees] = counts[agrees].counted(chance, true=proposed == token)
        return replace(self, agreeing=counts[True], differing=counts[False])


def mix(base: Proposal, auxiliary: Proposal, weight: MixtureWeight, width: int) -> Proposal:
    """The ``width`` likeliest tokens of both, best first; of one where the other is silent."""
    if not len(base[0]):
        return auxiliary[0][:width], auxiliary[1][:width]
    if len(auxiliary[0]):
        corrected = {
            token: (weight.agreeing if agrees else weight.differing).corrected(chance)
            for token, chance, agrees in _chances(base, auxiliary)
        }
    elif weight.agreeing.seen or weight.differing.seen:
        chance = math.exp(base[1][0])
        corrected = {base[0][0]: max(chance, weight.base_alone.corrected(chance))}
    else:  # the auxiliary has never proposed anything
        return base[0][:width], base[1][:width]
    chances = _renormalized(probabilities(base), corrected)
    # The sort is stable: equal tokens keep the order of ``chances``.
    best = sorted((t for t in chances if chances[t]), key=chances.__getitem__, reverse=True)
    best = best[:width]
    return (best, [min(0.0, math.log(chances[t])) for t in best]) if best else NO_PROPOSAL


def _renormalized(base: dict[int, float], corrected: dict[int, float]) -> dict[int, float]:
    """``base`` with the chances ``corrected`` of some tokens; the others share what is left."""
    total = sum(corrected.values())
    scale = min(1.0, MAX_CHANCE / total) if total else 1.0
    covered = sum(base.get(token, 0.0) for token in corrected)
    left = (1 - total * scale) / max(1 - covered, 1 - MAX_CHANCE)
    others = {token: chance * left for token, chance in base.items()}
    return others | {token: chance * scale for token, chance in corrected.items()}


def probabilities(proposal: Proposal) -> dict[int, float]:
    """By token; those with none are left out."""
    return {
        token: math.exp(log_prob)
        for token, log_prob in zip(*proposal, strict=True)
        if log_prob > float("-inf")
    }


def _chances(base: Proposal, auxiliary: Proposal) -> Iterator[tuple[int, float, bool]]:
    """The auxiliary's tokens, each with its chance before it is corrected, and whether it is the
    base's first choice. What the auxiliary leaves open it leaves to the base."""
    stated, proposed = probabilities(base), probabilities(auxiliary)
    unsure = max(0.0, 1 - sum(proposed.values()))
    for token, chance in proposed.items():
        by_base = stated.get(token, 0.0)
        mixed = (1 - INITIAL_WEIGHT) * by_base + INITIAL_WEIGHT * (chance + unsure * by_base)
        yield token, mixed, token == base[0][0]


class Proposals(Struct, frozen=True):
    """What was proposed for a node: by the base, and by every auxiliary source."""

    base: Proposal
    auxiliary: tuple[Proposal, ...]


class OnlineWeights(Struct, frozen=True):
    """A session's mixture weights, and the proposals that will change them.

    A tree is grown in many steps (level by level, again from a new tip), and a verdict comes after
    several of them, so proposals are kept by path as long as the path may come true."""

    weights: tuple[MixtureWeight, ...]
    pending: Mapping[Path, Proposals] = {}

    def mix(self, proposals: Proposals, width: int) -> Proposal:
        """The mixture of all of them; there may be fewer auxiliary proposals than weights."""
        mixed = proposals.base
        for weight, auxiliary in zip(self.weights, proposals.auxiliary, strict=False):
            mixed = mix(mixed, auxiliary, weight, max(width, MIN_SUCCESSORS))
        return mixed[0][:width], mixed[1][:width]

    def advance(self, committed: Sequence[int]) -> OnlineWeights:
        """After some tokens were committed. Every auxiliary is compared with the mixture of the
        base and those before it."""
        pending, settled = settle(self.pending, committed)
        weights = self.weights
        for proposals, token in settled:
            mixed, updated = proposals.base, []
            for weight, auxiliary in zip(weights, proposals.auxiliary, strict=True):
                updated.append(weight.learn(mixed, auxiliary, token))
                mixed = mix(mixed, auxiliary, weight, MIN_SUCCESSORS)
            weights = tuple(updated)
        return OnlineWeights(weights, pending)


def settle(
    pending: Mapping[Path, T], committed: Sequence[int]
) -> tuple[Mapping[Path, T], list[tuple[T, int]]]:
    """The tip moves along ``committed``: what stays pending, and what was proposed for these
    tokens, each with the token that came true."""
    if not committed:
        return pending, []
    walked = tuple(committed)
    depth = len(walked)
    steps = ((pending.get(walked[:i]), token) for i, token in enumerate(walked))
    settled = [(proposed, token) for proposed, token in steps if proposed is not None]
    return {p[depth:]: one for p, one in pending.items() if p[:depth] == walked}, settled
