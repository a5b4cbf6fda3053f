"""What a simulated run meets: jitter, and users who are not as the planner was told. Pure."""

from __future__ import annotations

import math

from msgspec import Struct

from asyncspec.rng import uniform

DRAFT, LINK, VERIFY = 1, 2, 3


class Noise(Struct, frozen=True):
    """Durations are lognormal with mean as planned; ``sigma`` 0 is a perfect machine.

    ``alphas`` by user are the true ones, if the deployment's are only estimates. ``expected``
    counts the mean of a round's tokens in place of drawing them.
    """

    sigma: float = 0.0
    seed: int = 0
    alphas: tuple[float, ...] | None = None
    expected: bool = False

    def factor(self, kind: int, who: int, round_: int) -> float:
        """The factor on one duration, by what it is, whose and in which round."""
        if not self.sigma:
            return 1.0
        key = self.seed * 4 + kind
        radius = math.sqrt(-2.0 * math.log(uniform(key, round_, 2 * who)))
        normal = radius * math.cos(2.0 * math.pi * uniform(key, round_, 2 * who + 1))
        return math.exp(self.sigma * normal - 0.5 * self.sigma**2)
