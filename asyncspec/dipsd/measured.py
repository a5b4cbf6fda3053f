"""What a running draft node is measured to be: its users' acceptance, its device, its links. Pure.

All users of a draft node share its device and its links, so these are the node's; how much of a
draft is right is the text's, so that is each user's own (``accepted``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import reduce

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.cost_model.passes import Deviation
from asyncspec.dipsd.accepted import Acceptance, Chance
from asyncspec_protocol.ids import SessionId

ENOUGH = 7.5
"""Rounds, the older ones counting less, from which on a measurement is told."""

PAST = 256.0
"""Rounds that users who have gone are worth at most."""

NOTHING = Acceptance()


class Affine(Struct, frozen=True):
    """Least squares for ``y = fixed + slope * x``; weighted sums. Neither is below 0."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def with_point(self, x: float, y: float) -> Affine:
        """One more, and the others count a little less."""
        keep = 1 - PARAMETERS.error_weight
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
    """A draft node. Mappings are never changed in place."""

    # By user; and of those who have gone, all together.
    users: Mapping[SessionId, Acceptance] = {}
    past: Acceptance = NOTHING
    drafting: Affine = Affine()
    # Sums over rounds: how many, and their seconds on links.
    links: Affine = Affine()
    # How far drafts are from that line, and links from their mean.
    drafts_off: Deviation = Deviation()
    links_off: Deviation = Deviation()

    def with_round(self, user: SessionId, drafted: int, accepted: int) -> Measured:
        """A round's draft was verified."""
        own = self.users.get(user, NOTHING).with_round(drafted, accepted)
        return replace(self, users={**self.users, user: own})

    def without(self, gone: Collection[SessionId]) -> Measured:
        """Some users have gone; what they showed is what is known of those to come."""
        past = reduce(Acceptance.plus, (self.users[user] for user in gone), self.past)
        past = past.scaled(min(1.0, PAST / max(1.0, past.rounds)))
        left = {user: own for user, own in self.users.items() if user not in gone}
        return replace(self, users=left, past=past)

    def with_draft(self, tokens: int, seconds: float) -> Measured:
        """The source has drafted so many tokens, one after another."""
        fixed, slope = self.drafting.fit
        off = self.drafts_off.observe(seconds, fixed + slope * tokens)
        return replace(self, drafting=self.drafting.with_point(tokens, seconds), drafts_off=off)

    def with_link(self, seconds: float) -> Measured:
        """What of a segment's way and its verdict's was spent at no stage."""
        seconds = max(0.0, seconds)
        off = self.links_off.observe(seconds, self.links.fit[1])
        return replace(self, links=self.links.with_point(1.0, seconds), links_off=off)

    @property
    def everybody(self) -> Acceptance:
        """All users there are and were, together."""
        return reduce(Acceptance.plus, self.users.values(), self.past)

    def chance(self, user: SessionId, everybody: Acceptance) -> Chance:
        """What is known of a user; ``everybody`` as above."""
        own = self.users.get(user, NOTHING)
        return own.chance(everybody.plus(own, -1.0))

    @property
    def timed(self) -> bool:
        """Whether drafts and links were seen."""
        return self.drafting.weight > 0 and self.links.weight > 0
