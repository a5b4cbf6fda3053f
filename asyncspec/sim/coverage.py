"""How well a draft guesses: the chance that the target's token is its r-th candidate. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from msgspec import Struct

MOST_RANKS = 32
_LEAST, _SUREST = 1e-9, 1.0 - 1e-6


class Coverage(Struct, frozen=True):
    """A table of chances by rank, and how they spread over nodes. Made by ``shaped``."""

    # The mean chance of the first candidate.
    top: float
    # The smallest chance of a first candidate at a node: below it the second would be likelier.
    floor: float
    # Of what the first candidate leaves: shares of the others by rank, summed up and in logs. They
    # descend; what they lack to 1 is the chance that no candidate is right.
    cumulative: tuple[float, ...]
    logs: tuple[float, ...]

    def confidence(self, quantile: float, top: float | None = None) -> float:
        """The chance of the first candidate at one node, for a ``quantile`` in [0, 1).

        Between ``floor`` and 1, with mean ``top`` over all quantiles (the mean of a power of the
        quantile), so a draft that says it is right as often as it says.
        """
        mean = self.top if top is None else top
        if mean >= 1.0:
            return 1.0
        floor = self.floor
        if mean <= floor:
            return max(floor, _LEAST)
        power = (1.0 - mean) / (mean - floor)
        return min(_SUREST, max(_LEAST, floor + (1.0 - floor) * math.pow(quantile, power)))

    def candidates(self, first: float) -> int:
        """How many there are at a node whose first candidate has the chance ``first``."""
        return 1 if first >= 1.0 else 1 + len(self.logs)

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


def harmonic(top: float, ranks: int = MOST_RANKS) -> Coverage:
    """The table measured of real drafts: the first k candidates miss with chance (1 - top) / k.

    For an 8B draft of a 70B model and for the bundled pairs alike, to within some percent (0.65
    gives .65, .91 among four, .956 among eight).
    """
    return shaped(top, [1.0 / (r * (r - 1)) for r in range(2, ranks + 1)])


def tabled(chances: Sequence[float]) -> Coverage:
    """A table of one's own. Raises ``ValueError`` with what is wrong with it."""
    if not chances or not 0 < chances[0] <= 1 or sum(chances) > 1 + 1e-9 or min(chances) < 0:
        raise ValueError("chances by rank are between 0 and 1, and 1 in all at most")
    if any(b > a for a, b in pairwise(chances)):
        raise ValueError("chances by rank descend")
    rest = 1.0 - chances[0]
    return shaped(chances[0], [c / rest for c in chances[1:] if c > 0])
