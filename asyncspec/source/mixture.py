"""How far a second opinion on the next token is trusted: a mixture whose weights are learned. Pure.

For one node a *base* (a draft model) gives a distribution, and an *aside* (n-gram lookup) a few
tokens with what it thinks of itself. The mixture ``(1 - w) base + w aside`` is a distribution
again, so its scores may be compared over the whole tree. The weight ``w`` is learned online, one
for each degree of the aside's own confidence, by expectation maximisation: of every token that
became certain, the aside is credited with its share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct

from asyncspec.source.grow import NOTHING, Proposal

PRIOR = 8.0
"""Tokens' worth of trust in what the aside says of itself, before it has been seen to be right."""

FLOOR = 1e-4
"""Probability of a token the base does not list: more than nothing, so that weights stay finite."""


class Opinion(Struct, frozen=True):
    """What an aside proposes for a node: tokens with shares that sum to 1, and how sure it is."""

    shares: Mapping[int, float]
    # In [0, 1].
    sure: float


def opinion(proposal: Proposal) -> Opinion:
    """The opinion in a proposal: the sum of its probabilities is how sure it is."""
    weights = [math.exp(log_prob) for log_prob in proposal[1]]
    total = sum(weights)
    if not total:
        return Opinion({}, 0.0)
    shares = {t: w / total for t, w in zip(proposal[0], weights, strict=True)}
    return Opinion(shares, min(1.0, total))


class Trust(Struct, frozen=True):
    """Weights of one aside, learned so far. Frozen: learning gives another."""

    # By degree: tokens seen, and the aside's share in them.
    seen: Mapping[int, tuple[float, float]] = {}

    def weight(self, sure: float) -> float:
        """The aside's weight where it is so sure of itself."""
        count, credit = self.seen.get(_degree(sure), (0.0, 0.0))
        return (credit + PRIOR * sure) / (count + PRIOR)

    def learn(self, base: Proposal, aside: Opinion, token: int) -> Trust:
        """After ``token`` became certain where both had their say."""
        if not aside.shares:
            return self
        weight = self.weight(aside.sure)
        ours = weight * aside.shares.get(token, 0.0)
        theirs = (1 - weight) * _probability(base, token)
        degree = _degree(aside.sure)
        count, credit = self.seen.get(degree, (0.0, 0.0))
        return Trust({**self.seen, degree: (count + 1, credit + ours / (ours + theirs))})


def mix(base: Proposal, aside: Opinion, weight: float, width: int) -> Proposal:
    """The ``width`` likeliest tokens of the mixture, best first."""
    if not aside.shares or not weight:
        return base
    mixed = {
        token: (1 - weight) * math.exp(log_prob)
        for token, log_prob in zip(*base, strict=True)
        if log_prob > float("-inf")
    }
    for token, share in aside.shares.items():
        rest = mixed.get(token, (1 - weight) * FLOOR)
        mixed[token] = rest + weight * share
    # Trusted wholly, an aside leaves nothing of what the base alone proposes.
    best = sorted((t for t in mixed if mixed[t]), key=lambda t: -mixed[t])[:width]
    return (best, [math.log(mixed[t]) for t in best]) if best else NOTHING


def _probability(proposal: Proposal, token: int) -> float:
    for known, log_prob in zip(*proposal, strict=True):
        if known == token:
            return max(math.exp(log_prob), FLOOR)
    return FLOOR


def _degree(sure: float) -> int:
    return round(10 * sure)
