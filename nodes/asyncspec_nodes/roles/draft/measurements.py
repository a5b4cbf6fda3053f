"""What a draft node measures for the planner: acceptance by user, draft times and link times.

All users of a draft node share its device and its links, so these are the node's; acceptance
depends on the text, so that is each user's own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import reduce
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.cost_model.passes import AffineFit, Deviation
from asyncspec_protocol.ids import SessionId

PRIOR_ROUNDS = 16.0
"""The weight of the other users' acceptance next to a user's own, in rounds at most."""

PAST_ROUNDS = 256.0
"""The weight of users who have left, in rounds at most."""

MIN_ROUNDS = 7.5
"""Rounds, the older ones counting less, before acceptance is reported."""

INTERVAL_DEVIATIONS = 1.0
"""Standard deviations between the mean and either end of the interval."""

_TINY = 1e-12


class AcceptanceEstimate(NamedTuple):
    """The chance of a drafted token to be accepted: Wilson's interval about the mean.

    Plans are made for ``low``: one for too high a chance costs far more than one for too low a
    chance (docs/plugins/dip-sd.md). ``rounds`` is the evidence, in rounds.
    """

    low: float
    mean: float
    high: float
    rounds: float


class AcceptanceCounts(Struct, frozen=True):
    """Drafts, their tokens that were verified with all before them accepted, and those accepted."""

    rounds: float = 0.0
    tried: float = 0.0
    accepted: float = 0.0

    def with_round(self, drafted: int, accepted: int) -> AcceptanceCounts:
        """One draft more, of so many tokens, of which the first ``accepted`` were accepted."""
        counts = AcceptanceCounts(1.0, min(drafted, accepted + 1), min(drafted, accepted))
        return self.scaled(1 - PARAMETERS.error_weight).plus(counts)

    def plus(self, counts: AcceptanceCounts) -> AcceptanceCounts:
        """Both together."""
        return AcceptanceCounts(
            max(0.0, self.rounds + counts.rounds),
            max(0.0, self.tried + counts.tried),
            max(0.0, self.accepted + counts.accepted),
        )

    def scaled(self, share: float) -> AcceptanceCounts:
        """The same rate, from so much evidence; with -1 it takes a part away (``plus``)."""
        return AcceptanceCounts(share * self.rounds, share * self.tried, share * self.accepted)

    def chance(self, others: AcceptanceCounts | None = None) -> AcceptanceEstimate:
        """The chance at any position; ``others``: the prior."""
        counts = self
        if others is not None and others.rounds > _TINY:
            counts = counts.plus(others.scaled(min(1.0, PRIOR_ROUNDS / others.rounds)))
        count = counts.tried
        if count <= _TINY:
            return AcceptanceEstimate(0.0, 0.0, 1.0, 0.0)
        share, z2 = min(1.0, counts.accepted / count), INTERVAL_DEVIATIONS**2
        spread = math.sqrt(z2 * (share * (1 - share) / count + z2 / (4 * count**2)))
        middle, scale = share + z2 / (2 * count), 1 + z2 / count
        low, high = max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)
        return AcceptanceEstimate(min(low, share), share, max(high, share), counts.rounds)


class DraftMeasurements(Struct, frozen=True):
    """What a draft node has measured. Mappings are never changed in place."""

    # By user; and of those who have left, together.
    users: Mapping[SessionId, AcceptanceCounts] = {}
    past: AcceptanceCounts = AcceptanceCounts()
    # Seconds of a draft by its tokens, and of a round on links by rounds.
    drafting: AffineFit = AffineFit()
    links: AffineFit = AffineFit()
    # Deviations of drafts from that line, and of links from their mean.
    draft_deviation: Deviation = Deviation()
    link_deviation: Deviation = Deviation()

    def with_round(self, user: SessionId, drafted: int, accepted: int) -> DraftMeasurements:
        """A round's draft was verified."""
        counts = self.users.get(user, AcceptanceCounts()).with_round(drafted, accepted)
        return replace(self, users={**self.users, user: counts})

    def without(self, gone: Collection[SessionId]) -> DraftMeasurements:
        """Some users have left; their acceptance is the prior of those to come."""
        past = reduce(AcceptanceCounts.plus, (self.users[user] for user in gone), self.past)
        past = past.scaled(min(1.0, PAST_ROUNDS / max(1.0, past.rounds)))
        left = {user: own for user, own in self.users.items() if user not in gone}
        return replace(self, users=left, past=past)

    def with_draft(self, tokens: int, seconds: float) -> DraftMeasurements:
        """The source has drafted so many tokens, one after another."""
        fixed, slope = self.drafting.fit
        deviation = self.draft_deviation.observe(seconds, fixed + slope * tokens)
        drafting = self.drafting.with_point(tokens, seconds)
        return replace(self, drafting=drafting, draft_deviation=deviation)

    def with_link(self, seconds: float) -> DraftMeasurements:
        """A segment and its verdict spent so long at no stage."""
        seconds = max(0.0, seconds)
        deviation = self.link_deviation.observe(seconds, self.links.fit[1])
        return replace(self, links=self.links.with_point(1.0, seconds), link_deviation=deviation)

    @property
    def total(self) -> AcceptanceCounts:
        """All users there are and were, together."""
        return reduce(AcceptanceCounts.plus, self.users.values(), self.past)

    def chance(self, user: SessionId, total: AcceptanceCounts) -> AcceptanceEstimate:
        """A user's acceptance, with the others' (of ``total``) as its prior."""
        counts = self.users.get(user, AcceptanceCounts())
        return counts.chance(total.plus(counts.scaled(-1.0)))

    @property
    def timed(self) -> bool:
        """Whether drafts and links were seen."""
        return self.drafting.weight > 0 and self.links.weight > 0
