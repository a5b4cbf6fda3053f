"""How far durations are from what was expected of them, as a share of it. Pure."""

from __future__ import annotations

import math

from msgspec import Struct

FORGET = 1 / 256
"""Share of what is known that each new measurement takes the place of."""

MOST = 1.0
"""A duration counts as at most this far off: one long pause is not a habit."""


class Deviation(Struct, frozen=True):
    """The mean square of relative errors, the latest counting most."""

    weight: float = 0.0
    squares: float = 0.0

    def with_time(self, seconds: float, expected: float) -> Deviation:
        """One more; where nothing was expected yet there is nothing to learn."""
        if expected <= 0:
            return self
        off = min(MOST, abs(seconds / expected - 1))
        keep = 1 - FORGET
        return Deviation(keep * self.weight + 1, keep * self.squares + off * off)

    @property
    def relative(self) -> float:
        """The relative deviation; 0 where nothing is known."""
        return math.sqrt(self.squares / self.weight) if self.weight else 0.0
