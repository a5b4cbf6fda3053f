"""What a running draft node is measured to be: acceptance, drafting and links. Pure.

The latest count most, so that what drifts is noticed. Acceptance is told with caution: a plan made
for too high a chance costs far more than one for too low a chance (docs/dipsd.md), so it is the
lower end of Wilson's interval, which is wide while little is known.
"""

from __future__ import annotations

import math

from msgspec import Struct
from msgspec.structs import replace

FORGET = 1 / 256
"""Share of what is known that each new round takes the place of."""

ENOUGH = 8
"""Rounds from which on a measurement is told."""

DOUBT = 1.0
"""Standard deviations between the mean and what is told."""

_TINY = 1e-12


class Acceptance(Struct, frozen=True):
    """Of the k-th token of drafts (from 0): how often it was judged with all before it accepted,
    and how often it was accepted itself."""

    tried: tuple[float, ...] = ()
    accepted: tuple[float, ...] = ()

    def with_round(self, drafted: int, accepted: int) -> Acceptance:
        """One draft more, of so many tokens, of which the first ``accepted`` were."""
        size = max(len(self.tried), drafted)
        tried = [*self.tried, *[0.0] * (size - len(self.tried))]
        right = [*self.accepted, *[0.0] * (size - len(self.accepted))]
        for k in range(size):
            keep = 1 - FORGET
            tried[k] = keep * tried[k] + (k < drafted and k <= accepted)
            right[k] = keep * right[k] + (k < accepted)
        return Acceptance(tuple(tried), tuple(right))

    @property
    def rates(self) -> tuple[float, ...]:
        """Mean acceptance by place; 0 where nothing was seen."""
        pairs = zip(self.accepted, self.tried, strict=True)
        return tuple(right / max(_TINY, tried) for right, tried in pairs)

    @property
    def cautious(self) -> float:
        """The lower end of Wilson's interval, over all places together: the model has one chance
        for them all."""
        count, right = sum(self.tried), sum(self.accepted)
        if count <= 0:
            return 0.0
        share, z2 = min(1.0, right / count), DOUBT**2
        spread = DOUBT * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
        return max(0.0, (share + z2 / (2 * count) - spread) / (1 + z2 / count))


class Affine(Struct, frozen=True):
    """Least squares for ``y = fixed + slope * x``; weighted sums. Neither is below 0."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def with_point(self, x: float, y: float) -> Affine:
        """One more, and the others count a little less."""
        keep = 1 - FORGET
        return Affine(
            keep * self.weight + 1,
            keep * self.x + x,
            keep * self.y + y,
            keep * self.xx + x * x,
            keep * self.xy + x * y,
        )

    @property
    def fit(self) -> tuple[float, float]:
        """(fixed, slope). Where all points are at one x the line goes through the origin."""
        if self.weight <= 0 or self.x <= 0:
            return 0.0, 0.0
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread = self.xx / self.weight - mean_x**2
        if spread <= 1e-6 * mean_x**2:
            return 0.0, mean_y / mean_x
        slope = (self.xy / self.weight - mean_x * mean_y) / spread
        slope = min(max(0.0, slope), mean_y / mean_x)
        return max(0.0, mean_y - slope * mean_x), slope


class Measured(Struct, frozen=True):
    """All of a draft node's users share its device and its links."""

    rounds: int = 0
    acceptance: Acceptance = Acceptance()
    drafting: Affine = Affine()
    # Sums over rounds: how many, and their seconds on links.
    links: Affine = Affine()
    # Of drafts: squares of how far each was from what the line said, as a share of it.
    deviation: Affine = Affine()

    def with_round(self, drafted: int, accepted: int) -> Measured:
        """A round's draft was judged."""
        acceptance = self.acceptance.with_round(drafted, accepted)
        return replace(self, rounds=self.rounds + 1, acceptance=acceptance)

    def with_draft(self, tokens: int, seconds: float) -> Measured:
        """The source has drafted so many tokens, one after another."""
        fixed, slope = self.drafting.fit
        expected, deviation = fixed + slope * tokens, self.deviation
        if expected > 0:
            off = min(1.0, abs(seconds / expected - 1))
            deviation = deviation.with_point(1.0, off * off)
        drafting = self.drafting.with_point(tokens, seconds)
        return replace(self, drafting=drafting, deviation=deviation)

    def with_link(self, seconds: float) -> Measured:
        """What of a segment's way and its verdict's was spent at no stage."""
        links = self.links.with_point(1.0, max(0.0, seconds))
        return replace(self, links=links)

    @property
    def jitter(self) -> float:
        """The relative deviation of drafts."""
        return math.sqrt(self.deviation.fit[1])

    @property
    def known(self) -> bool:
        """Whether enough was seen to be told."""
        return self.rounds >= ENOUGH and self.drafting.weight > 0 and self.links.weight > 0
