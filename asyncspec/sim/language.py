"""A model of language: what the target says after a text, and how well a draft guesses.

A text is known by the hash of its path, made token by token, so nothing costs O(length). Target and
draft are functions of that hash; nothing is stored or drawn from a generator.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Protocol

from msgspec import Struct

from asyncspec.core.reference import NextToken
from asyncspec.core.rng import GOLDEN, MASK, mix, uniform
from asyncspec.source.expand import Proposal

MAX_RANKS = 32  # candidates of a draft's table
_LEAST, _SUREST = 1e-9, 1.0 - 1e-6


class Coverage(Struct, frozen=True):
    """A table of chances by rank, and how they spread over nodes. Made by ``shaped``."""

    # The mean chance of the first candidate.
    top: float
    # The smallest chance of a first candidate at a node: below it the second would be likelier.
    floor: float
    # Shares of the candidates after the first in what it leaves, by rank, summed up and in logs.
    # They descend; what they lack to 1 is the chance that no candidate is right.
    cumulative: tuple[float, ...]
    logs: tuple[float, ...]

    def confidence(self, quantile: float, mean: float) -> float:
        """The chance of the first candidate at one node, for a ``quantile`` in [0, 1): between
        ``floor`` and 1, with ``mean`` over all quantiles (of a power of the quantile), so the draft
        is calibrated."""
        if mean >= 1.0:
            return 1.0
        floor = self.floor
        if mean <= floor:
            return max(floor, _LEAST)
        power = (1.0 - mean) / (mean - floor)
        return min(_SUREST, max(_LEAST, floor + (1.0 - floor) * math.pow(quantile, power)))

    def rank(self, first: float, draw: float) -> int:
        """The truth's rank for a ``draw`` in [0, 1); past the last where no candidate is right."""
        if draw < first:
            return 0
        return 1 + bisect_right(self.cumulative, (draw - first) / (1.0 - first))

    def scores(self, first: float, count: int) -> list[float]:
        """Log-probabilities of the first ``count`` candidates."""
        if first >= 1.0:
            return [0.0]
        rest = math.log(1.0 - first)
        return [math.log(first), *[rest + log for log in self.logs[: count - 1]]]


def shaped(top: float, shape: Sequence[float]) -> Coverage:
    """``shape[r]`` is the share of what the first candidate leaves that falls to number r + 2; it
    descends and is nowhere 0."""
    floor = shape[0] / (1 + shape[0]) if shape else 0.0
    logs = tuple(map(math.log, shape))
    return Coverage(top, floor, tuple(accumulate(shape)), logs)


def harmonic(top: float, ranks: int = MAX_RANKS) -> Coverage:
    """The table measured of real drafts: the first k candidates miss with chance (1 - top) / k, for
    an 8B draft of a 70B model and the bundled pairs alike, to within some percent (0.65 gives .65,
    .91 among four, .956 among eight)."""
    return shaped(top, [1.0 / (r * (r - 1)) for r in range(2, ranks + 1)])


def tabled(chances: Sequence[float]) -> Coverage:
    """A table of one's own. Raises ``ValueError`` with what is wrong with it."""
    first, *others = chances or [0.0]
    possible = first > 0 and all(0 <= chance <= 1 for chance in chances)  # not with NaN
    if not possible or sum(chances) > 1 + 1e-9 or (first == 1 and any(others)):
        raise ValueError("chances by rank are between 0 and 1, and 1 in all at most")
    if any(b > a for a, b in pairwise(chances)):
        raise ValueError("chances by rank descend")
    # Rounded ones may be a little more than 1 in all.
    rest = max(1.0 - first, sum(others))
    return shaped(first, [chance / rest for chance in others if chance > 0])


EMPTY = 0
"""The path of the empty text."""

_NO_CHANCE = -1e9
"""As a log-probability. Minus infinity cannot be written in a trace."""


def follow(path: int, token: int) -> int:
    """The path one token further on."""
    return mix((path + GOLDEN * (token + 1)) & MASK)


class Language(Protocol):
    """What a simulated target says and a simulated draft guesses. Token ids are 0 or more."""

    def prompt(self, request: int, length: int) -> tuple[int, ...]:
        """The prompt of the ``request``-th request, about ``length`` tokens long."""

    def longest(self, request: int) -> int | None:
        """Most new tokens there are for a request; None: no limit."""

    def truth(self, path: int) -> int:
        """The target's token after ``path``."""

    def propose(self, path: int, position: int, stale: int, width: int) -> Proposal:
        """The draft's likeliest tokens after ``path``, best first, with log-probabilities (nats).
        ``position``: length of the text, whose last ``stale`` tokens the target has not
        confirmed."""


def likely(language: Language, path: int, position: int, count: int) -> Proposal:
    """The target's ``count`` likeliest tokens after ``path``, for lossy policies: the one it takes,
    then the draft's candidates in their order, with the draft's chances by rank. Where there are no
    more, the last is repeated with no chance, because every node of a verdict has as many."""
    truth = language.truth(path)
    candidates, scores = language.propose(path, position, 0, count)
    chances = list(scores) or [0.0]
    tokens = [truth, *(token for token in candidates if token != truth)][: len(chances)]
    missing = count - len(tokens)
    return tokens + tokens[-1:] * missing, chances[: len(tokens)] + [_NO_CHANCE] * missing


def sequential(language: Language) -> NextToken:
    """The target for the sequential reference decoder: reads every token of a growing text once."""
    length, path = 0, EMPTY

    def next_token(tokens: Sequence[int]) -> int:
        nonlocal length, path
        for i in range(length, len(tokens)):
            path = follow(path, tokens[i])
        length = len(tokens)
        return language.truth(path)

    return next_token


_TRUTH, _GUESS, _COPY = 0x71, 0x67, 0x63

COPIED = harmonic(0.95)
"""An n-gram source in text that repeats itself."""

SPAN = 16
"""Tokens that are copied in one go, or not."""


class Synthetic(Struct, frozen=True):
    """Texts without end over ``vocab`` tokens, which number more than a draft's candidates. What
    comes next is hashed from the path. The draft's confidence varies from node to node and is
    calibrated: of the nodes where it gives its first candidate the chance p, a share p is right."""

    coverage: Coverage = harmonic(0.65)
    # Each further unconfirmed token multiplies the chance of the first candidate: an EAGLE head
    # sees the target's own features up to the tip only. 1: a draft model of its own.
    decay: float = 1.0
    # Share of the text that repeats what stood earlier, where an n-gram source helps the draft.
    repetition: float = 0.0
    vocab: int = 32_000
    seed: int = 0

    def prompt(self, request: int, length: int) -> tuple[int, ...]:
        key = self.seed + 7919 * (request + 1)
        return tuple(int(uniform(key, i) * self.vocab) for i in range(length))

    def longest(self, request: int) -> int | None:
        return None

    def truth(self, path: int) -> int:
        return self._hash(path, _TRUTH) % self.vocab

    def propose(self, path: int, position: int, stale: int, width: int) -> Proposal:
        bits = self._hash(path, _GUESS)
        coverage, top = self.coverage, self.coverage.top * self.decay**stale
        if self.repetition and uniform(self.seed ^ _COPY, position // SPAN) < self.repetition:
            coverage, top = COPIED, COPIED.top
        first = coverage.confidence((bits & 0xFFFFFFFF) * 2.0**-32, top)
        ranked = 1 if first >= 1.0 else 1 + len(coverage.logs)
        rank, count = coverage.rank(first, (bits >> 32) * 2.0**-32), min(width, ranked)
        truth = self.truth(path)
        start = (truth + 1 + bits % (self.vocab - ranked)) % self.vocab
        order = [token % self.vocab for token in range(start, start + count)]
        if rank < count:
            order[rank] = truth
        return order, coverage.scores(first, count)

    def _hash(self, path: int, purpose: int) -> int:
        return mix((path ^ (self.seed * GOLDEN + purpose * 0x9E3779B9)) & MASK)


class Turning(Struct, frozen=True):
    """A text that from a position on is as hard to guess as another one, with the words of the
    first."""

    first: Synthetic
    later: Synthetic
    position: int

    def prompt(self, request: int, length: int) -> tuple[int, ...]:
        return self.first.prompt(request, length)

    def longest(self, request: int) -> int | None:
        return None

    def truth(self, path: int) -> int:
        return self.first.truth(path)

    def propose(self, path: int, position: int, stale: int, width: int) -> Proposal:
        text = self.first if position < self.position else self.later
        return text.propose(path, position, stale, width)
