"""What a simulated run meets: jitter, and users who are not as the planner was told. Pure."""

from __future__ import annotations

import math

from msgspec import Struct

from asyncspec.core.rng import uniform

DRAFT, LINK, VERIFY = 1, 2, 3


class Deviations(Struct, frozen=True):
    """Relative deviations as measured: of drafts and of links by user, of passes by stage."""

    drafts: tuple[float, ...]
    links: tuple[float, ...]
    passes: tuple[float, ...]


class Noise(Struct, frozen=True):
    """Durations are lognormal with mean as planned; ``sigma`` 0 is a perfect machine.

    ``alphas`` by user are the true ones, if the deployment's are only estimates. ``expected``
    counts the mean of a round's tokens in place of drawing them. ``deviations`` take the place of
    ``sigma`` where they differ by what it is and whose.
    """

    sigma: float = 0.0
    seed: int = 0
    alphas: tuple[float, ...] | None = None
    expected: bool = False
    deviations: Deviations | None = None

    @property
    def quiet(self) -> bool:
        """Whether everything takes as long as planned."""
        whose = self.deviations
        if whose is None:
            return not self.sigma
        return not any((*whose.drafts, *whose.links, *whose.passes))

    def sigma_of(self, kind: int, whose: int) -> float:
        """The deviation of a user's drafts or links, or of a stage's passes."""
        if self.deviations is None:
            return self.sigma
        tables = (self.deviations.drafts, self.deviations.links, self.deviations.passes)
        return tables[kind - DRAFT][whose]

    def factor(self, kind: int, who: int, round_: int, sigma: float | None = None) -> float:
        """The factor on one duration, by what it is, whose and in which round."""
        sigma = self.sigma if sigma is None else sigma
        if not sigma:
            return 1.0
        key = self.seed * 4 + kind
        radius = math.sqrt(-2.0 * math.log(uniform(key, round_, 2 * who)))
        normal = radius * math.cos(2.0 * math.pi * uniform(key, round_, 2 * who + 1))
        return math.exp(sigma * normal - 0.5 * sigma**2)


QUIET = Noise()
"""Machines that are as planned."""
