"""How well a draft guesses: the chance that the target's token is its r-th candidate. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct

MOST_RANKS = 32
_SUREST = 1.0 - 1e-6


class Coverage(Struct, frozen=True):
    """A table of chances by rank, and how they spread over nodes.

    ``top`` is the mean chance of the first candidate. ``shape[r]`` is the share of what is left
    that falls to candidate ``r + 1``; it descends, and what it lacks to 1 is the chance that no
    candidate is right.
    """

    top: float
    shape: tuple[float, ...]

    @property
    def floor(self) -> float:
        """The smallest chance of a first candidate: below it the second would be likelier."""
        return self.shape[0] / (1 + self.shape[0]) if self.shape else 0.0

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
            return max(floor, 1e-9)
        power = (1.0 - mean) / (mean - floor)
        return min(_SUREST, floor + (1.0 - floor) * math.pow(quantile, power))

    def chances(self, first: float) -> tuple[float, ...]:
        """Chances by rank at a node whose first candidate has the chance ``first``."""
        if first >= 1.0:
            return (1.0,)
        rest = 1.0 - first
        return (first, *[rest * share for share in self.shape])


def harmonic(top: float, ranks: int = MOST_RANKS) -> Coverage:
    """The table measured of real drafts: the first k candidates miss with chance (1 - top) / k.

    For an 8B draft of a 70B model and for the bundled pairs alike, to within some percent (0.65
    gives .65, .91 among four, .956 among eight).
    """
    return Coverage(top, tuple(1.0 / (r * (r - 1)) for r in range(2, ranks + 1)))


def tabled(chances: Sequence[float]) -> Coverage:
    """A table of one's own. Raises ``ValueError`` with what is wrong with it."""
    if not chances or not 0 < chances[0] <= 1 or sum(chances) > 1 + 1e-9 or min(chances) < 0:
        raise ValueError("chances by rank are between 0 and 1, and 1 in all at most")
    if any(b > a for a, b in pairwise(chances)):
        raise ValueError("chances by rank descend")
    rest = 1.0 - chances[0]
    return Coverage(chances[0], tuple(c / rest for c in chances[1:] if c > 0) if rest > 0 else ())
