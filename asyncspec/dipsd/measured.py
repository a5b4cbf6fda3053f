"""What a draft node measures for the planner: acceptance by user, draft times and link times.

All users of a draft node share its device and its links, so these are the node's; how often drafts
are accepted depends on the text, so that is each user's own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import reduce
from itertools import zip_longest
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.cost_model.passes import Deviation
from asyncspec_protocol.ids import SessionId

PRIOR = 16.0
"""Rounds of a user's own that the others' are worth at most."""

DOUBT = 1.0
"""Standard deviations between the mean and either end of the interval."""

_TINY = 1e-12


class AcceptanceEstimate(NamedTuple):
    """Of a drafted token to be accepted: Wilson's interval about the mean.

    Plans are made for ``low``: one for too high a chance costs far more than one for too low a
    chance (docs/reference/dip-sd.md). ``rounds`` is what is known, in rounds.
    """

    low: float
    mean: float
    high: float
    rounds: float


class AcceptanceCounts(Struct, frozen=True):
    """Of the k-th token of drafts (from 0): how often it was verified with all before it accepted,
    and how often it was accepted itself."""

    tried: tuple[float, ...] = ()
    accepted: tuple[float, ...] = ()

    def with_round(self, drafted: int, accepted: int) -> AcceptanceCounts:
        """One draft more, of so many tokens, of which the first ``accepted`` were."""
        one = AcceptanceCounts(
            tuple([float(k <= accepted) for k in range(drafted)]),
            tuple([float(k < accepted) for k in range(drafted)]),
        )
        return self.scaled(1 - PARAMETERS.error_weight).plus(one)

    def plus(self, other: AcceptanceCounts, sign: float = 1.0) -> AcceptanceCounts:
        """Both together; with ``sign`` -1 the one without the other, which is part of it."""
        return AcceptanceCounts(
            _sum(self.tried, other.tried, sign), _sum(self.accepted, other.accepted, sign)
        )

    def scaled(self, share: float) -> AcceptanceCounts:
        """The same rates, from so much less evidence."""
        return AcceptanceCounts(
            tuple([share * count for count in self.tried]),
            tuple([share * count for count in self.accepted]),
        )

    @property
    def rounds(self) -> float:
        """Drafts: of each the first token was verified."""
        return self.tried[0] if self.tried else 0.0

    @property
    def rates(self) -> tuple[float, ...]:
        """Mean acceptance by place; 0 where nothing was seen."""
        pairs = zip(self.accepted, self.tried, strict=True)
        return tuple(right / max(_TINY, tried) for right, tried in pairs)

    def chance(self, others: AcceptanceCounts | None = None) -> AcceptanceEstimate:
        """Over all places together, because the model has one chance for them all. ``others``:
        the prior."""
        known = self
        if others is not None and others.rounds > _TINY:
            known = known.plus(others.scaled(min(1.0, PRIOR / others.rounds)))
        count, right = sum(known.tried), sum(known.accepted)
        if count <= _TINY:
            return AcceptanceEstimate(0.0, 0.0, 1.0, 0.0)
        share, z2 = min(1.0, right / count), DOUBT**2
        spread = DOUBT * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
        middle, scale = share + z2 / (2 * count), 1 + z2 / count
        low, high = max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)
        return AcceptanceEstimate(min(low, share), share, max(high, share), known.rounds)


def _sum(left: tuple[float, ...], right: tuple[float, ...], sign: float) -> tuple[float, ...]:
    return tuple([max(0.0, a + sign * b) for a, b in zip_longest(left, right, fillvalue=0.0)])


ENOUGH = 7.5
"""Rounds, the older ones counting less, from which on a measurement is told."""

PAST = 256.0
"""Rounds that users who have gone are worth at most."""

NOTHING = AcceptanceCounts()


class AffineFit(Struct, frozen=True):
    """Least squares for ``y = fixed + slope * x``; weighted sums. Neither is below 0."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def with_point(self, x: float, y: float) -> AffineFit:
        """One more, and the others count a little less."""
        keep = 1 - PARAMETERS.error_weight
        return AffineFit(
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


class DraftMeasurements(Struct, frozen=True):
    """A draft node. Mappings are never changed in place."""

    # By user; and of those who have gone, all together.
    users: Mapping[SessionId, AcceptanceCounts] = {}
    past: AcceptanceCounts = NOTHING
    drafting: AffineFit = AffineFit()
    # Sums over rounds: how many, and their seconds on links.
    links: AffineFit = AffineFit()
    # How far drafts are from that line, and links from their mean.
    drafts_off: Deviation = Deviation()
    links_off: Deviation = Deviation()

    def with_round(self, user: SessionId, drafted: int, accepted: int) -> DraftMeasurements:
        """A round's draft was verified."""
        own = self.users.get(user, NOTHING).with_round(drafted, accepted)
        return replace(self, users={**self.users, user: own})

    def without(self, gone: Collection[SessionId]) -> DraftMeasurements:
        """Some users have gone; what they showed is what is known of those to come."""
        past = reduce(AcceptanceCounts.plus, (self.users[user] for user in gone), self.past)
        past = past.scaled(min(1.0, PAST / max(1.0, past.rounds)))
        left = {user: own for user, own in self.users.items() if user not in gone}
        return replace(self, users=left, past=past)

    def with_draft(self, tokens: int, seconds: float) -> DraftMeasurements:
        """The source has drafted so many tokens, one after another."""
        fixed, slope = self.drafting.fit
        off = self.drafts_off.observe(seconds, fixed + slope * tokens)
        return replace(self, drafting=self.drafting.with_point(tokens, seconds), drafts_off=off)

    def with_link(self, seconds: float) -> DraftMeasurements:
        """What of a segment's way and its verdict's was spent at no stage."""
        seconds = max(0.0, seconds)
        off = self.links_off.observe(seconds, self.links.fit[1])
        return replace(self, links=self.links.with_point(1.0, seconds), links_off=off)

    @property
    def everybody(self) -> AcceptanceCounts:
        """All users there are and were, together."""
        return reduce(AcceptanceCounts.plus, self.users.values(), self.past)

    def chance(self, user: SessionId, everybody: AcceptanceCounts) -> AcceptanceEstimate:
        """What is known of a user; ``everybody`` as above."""
        own = self.users.get(user, NOTHING)
        return own.chance(everybody.plus(own, -1.0))

    @property
    def timed(self) -> bool:
        """Whether drafts and links were seen."""
        return self.drafting.weight > 0 and self.links.weight > 0
