"""What plans bring, next to what greedy batching brings: measured while either is in use. Pure.

A forecast may be wrong: estimates are, and what else the verifier does is in none. Both are held
against the same forecast, that of greedy batching, so what is wrong with it is wrong for both.
Plans that bring less than greedy batching are dropped for a while, which doubles with every further
failure; and from time to time greedy batching is used for a moment to see what it brings here.
"""

from __future__ import annotations

import math

from msgspec import Struct
from msgspec.structs import replace

MEMORY = 1024
"""Rounds after which what was brought counts a third; at least ``CYCLES`` rounds of each user."""

CYCLES = 64

BELIEF = 64.0
"""Rounds for which greedy batching is believed to bring what its forecast says."""

NOISE = 0.7
"""Relative deviation of the tokens of a round: rounds are close to geometric."""

REST = 8.0
"""Plans are not tried for so many times as long as the trial took that has failed."""

FAILURES = 12
"""The rest doubles so often at most."""

FIRST_LOOK = 64.0
"""Periods of plans after which greedy batching is looked at for the first time."""

LOOK = 1 / 16
"""Share of the time before that such a look takes."""


class Account(Struct, frozen=True):
    """What rounds have brought, how long they took their users, and the tokens that greedy batching
    was forecast to bring the same users in that time. The latest count most."""

    tokens: float = 0.0
    rounds: float = 0.0
    seconds: float = 0.0
    forecast: float = 0.0

    def with_round(self, tokens: int, seconds: float, rate: float, users: int) -> Account:
        """A round of one of so many users, to whom greedy batching was forecast to bring ``rate``
        tokens a second."""
        keep = 1 - 1 / max(MEMORY, CYCLES * users)
        return Account(
            keep * self.tokens + tokens,
            keep * self.rounds + 1,
            keep * self.seconds + seconds,
            keep * self.forecast + seconds * rate,
        )

    @property
    def rate(self) -> float:
        """Tokens a second of the mean user."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def share(self) -> float:
        """Of the forecast; 1 where nothing is known."""
        return self.tokens / self.forecast if self.forecast > 0 else 1.0

    @property
    def believed(self) -> float:
        """The share where the forecast itself counts as ``BELIEF`` rounds."""
        if self.rounds <= 0 or self.forecast <= 0:
            return 1.0
        weight = self.rounds / (self.rounds + BELIEF)
        return weight * self.share + 1 - weight

    def doubt(self, users: int) -> float:
        """How far the share may be off: by chance, and by the cycle in which users fall in."""
        rounds = max(1.0, self.rounds)
        return NOISE / math.sqrt(rounds) + users / rounds


class Comparison(Struct, frozen=True):
    """Plans and greedy batching. Moments in seconds, of any clock that does not go back."""

    plans: Account = Account()
    greedy: Account = Account()
    # Since when plans are in use; None: they are not.
    tried: float | None = None
    # Until then they rest; before ``floor`` whatever changes.
    until: float = -math.inf
    floor: float = -math.inf
    # Trials that have failed since one has not; and whether the rest is only a look.
    failures: int = 0
    looking: bool = False
    # Seconds that plans are in use before the next look; 0: not known yet.
    stretch: float = 0.0

    def brought(self, tokens: int, seconds: float, rate: float, users: int) -> Comparison:
        """A round has ended; as in ``Account``."""
        if self.tried is None:
            return replace(self, greedy=self.greedy.with_round(tokens, seconds, rate, users))
        return replace(self, plans=self.plans.with_round(tokens, seconds, rate, users))

    def begun(self, now: float) -> Comparison:
        """Plans are in use from now on, unless they were already."""
        if self.tried is not None:
            return self
        return replace(self, tried=now, until=-math.inf, looking=False)

    def ended(self) -> Comparison:
        """Greedy batching is in use, because it is forecast to be better."""
        return self if self.tried is None else replace(self, tried=None)

    def opens(self, *, changed: bool) -> float:
        """From when on plans may be tried. ``changed``: the users or what is measured of them are
        noticeably others than those for whom plans have failed."""
        return self.floor if changed and not self.looking else self.until

    def disappointing(self, users: int) -> bool:
        """Whether plans surely bring less than greedy batching does or would."""
        if self.tried is None or self.plans.rounds < 4 * users:
            return False
        return self.plans.share + self.plans.doubt(users) < self.greedy.believed

    def dropped(self, now: float, users: int) -> Comparison:
        """Plans have failed: they rest, and are tried as if for the first time after it."""
        assert self.tried is not None
        rest = REST * max(now - self.tried, self.plans.seconds / max(1, users))
        return replace(
            self,
            plans=Account(),
            tried=None,
            floor=now + rest,
            until=now + rest * 2.0**self.failures,
            failures=min(FAILURES, self.failures + 1),
            looking=False,
            stretch=0.0,
        )

    def due(self, now: float, period: float) -> bool:
        """Whether it is time to look what greedy batching brings here; ``period`` of the plan."""
        if self.tried is None:
            return False
        return now - self.tried >= max(self.stretch, FIRST_LOOK * period)

    def looked(self, now: float) -> Comparison:
        """Greedy batching is used for a moment. A trial as long as this has not failed."""
        assert self.tried is not None
        stretch = now - self.tried
        until = now + LOOK * stretch
        return replace(
            self,
            tried=None,
            floor=until,
            until=until,
            failures=0,
            looking=True,
            stretch=2 * stretch,
        )
