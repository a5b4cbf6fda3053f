"""How often a user's drafts are accepted, as counted; with what is not known of it. Pure.

The latest count most, so that what drifts is noticed. Of one user little is known for long, of all
users of a draft node together much: what the others show is taken for some rounds of the user's
own (a Beta prior), which fewer and fewer of the whole are as the user's rounds come in.
"""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import NamedTuple

from msgspec import Struct

from asyncspec.core.cost_model.parameters import PARAMETERS

PRIOR = 16.0
"""Rounds of a user's own that the others' are worth at most."""

DOUBT = 1.0
"""Standard deviations between the mean and either end of the interval."""

_TINY = 1e-12


class Chance(NamedTuple):
    """Of a drafted token to be accepted: Wilson's interval about the mean.

    Plans are made for ``low``: one for too high a chance costs far more than one for too low a
    chance (docs/reference/dip-sd.md). ``rounds`` is what is known, in rounds.
    """

    low: float
    mean: float
    high: float
    rounds: float


class Acceptance(Struct, frozen=True):
    """Of the k-th token of drafts (from 0): how often it was verified with all before it accepted,
    and how often it was accepted itself."""

    tried: tuple[float, ...] = ()
    accepted: tuple[float, ...] = ()

    def with_round(self, drafted: int, accepted: int) -> Acceptance:
        """One draft more, of so many tokens, of which the first ``accepted`` were."""
        one = Acceptance(
            tuple([float(k <= accepted) for k in range(drafted)]),
            tuple([float(k < accepted) for k in range(drafted)]),
        )
        return self.scaled(1 - PARAMETERS.error_weight).plus(one)

    def plus(self, other: Acceptance, sign: float = 1.0) -> Acceptance:
        """Both together; with ``sign`` -1 the one without the other, which is part of it."""
        return Acceptance(
            _sum(self.tried, other.tried, sign), _sum(self.accepted, other.accepted, sign)
        )

    def scaled(self, share: float) -> Acceptance:
        """The same rates, from so much less evidence."""
        return Acceptance(
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

    def chance(self, others: Acceptance | None = None) -> Chance:
        """Over all places together, because the model has one chance for them all. ``others``:
        the prior."""
        known = self
        if others is not None and others.rounds > _TINY:
            known = known.plus(others.scaled(min(1.0, PRIOR / others.rounds)))
        count, right = sum(known.tried), sum(known.accepted)
        if count <= _TINY:
            return Chance(0.0, 0.0, 1.0, 0.0)
        share, z2 = min(1.0, right / count), DOUBT**2
        spread = DOUBT * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
        middle, scale = share + z2 / (2 * count), 1 + z2 / count
        low, high = max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)
        return Chance(min(low, share), share, max(high, share), known.rounds)


def _sum(left: tuple[float, ...], right: tuple[float, ...], sign: float) -> tuple[float, ...]:
    return tuple([max(0.0, a + sign * b) for a, b in zip_longest(left, right, fillvalue=0.0)])
