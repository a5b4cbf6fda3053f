"""What plans bring, next to what greedy batching brings: measured while either is in use.

Forecasts are made of estimates and know nothing of the verifier's other work. Both are compared
with the same one, that of greedy batching, so its error is the same for both. Plans that bring less
than greedy batching rest for a while, which doubles with every further failure; from time to time
greedy batching is used briefly to probe what it brings.
"""

from __future__ import annotations

import math

from msgspec import Struct
from msgspec.structs import replace

MEMORY_ROUNDS, MEMORY_CYCLES = 1024, 64
"""Rounds after which a round counts a third; at least so many rounds of each user."""

PRIOR_ROUNDS = 64.0
"""The weight of greedy batching's forecast next to what was measured of it, in rounds."""

MIN_TRIAL_CYCLES = 4
"""Cycles of all users before plans can fail."""

ROUND_DEVIATION = 0.7
"""Relative deviation of the tokens of a round: rounds are close to geometric."""

REST_FACTOR = 8.0
"""Plans rest so many times as long as a failed trial took: it costs a ninth of the time at most."""

MAX_DOUBLINGS = 12
"""The rest doubles so often at most."""

FIRST_PROBE = 64.0
"""Periods of plans until greedy batching is probed for the first time."""

PROBE_SHARE = 1 / 16
"""Duration of a probe, as a share of the time before it."""


class Throughput(Struct, frozen=True):
    """Exponentially weighted sums over rounds: tokens, seconds, and the tokens that greedy batching
    was forecast to bring the same users in that time."""

    tokens: float = 0.0
    rounds: float = 0.0
    seconds: float = 0.0
    forecast: float = 0.0

    def with_round(self, tokens: int, seconds: float, rate: float, users: int) -> Throughput:
        """One round more, of one of ``users`` users, whose forecast is ``rate`` tokens a second."""
        keep = 1 - 1 / max(MEMORY_ROUNDS, MEMORY_CYCLES * users)
        return Throughput(
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
        """Observed over forecast tokens; 1 before any round."""
        return self.tokens / self.forecast if self.forecast > 0 else 1.0

    @property
    def prior_share(self) -> float:
        """The share, with the forecast as a prior of ``PRIOR_ROUNDS`` rounds."""
        weight = self.rounds / (self.rounds + PRIOR_ROUNDS)
        return weight * self.share + 1 - weight

    def uncertainty(self, users: int) -> float:
        """How far the share may be off: by chance, and by the cycle in which users fall in."""
        rounds = max(1.0, self.rounds)
        return ROUND_DEVIATION / math.sqrt(rounds) + users / rounds


class PlanComparison(Struct, frozen=True):
    """Plans against greedy batching. Times in seconds of any monotonic clock."""

    plans: Throughput = Throughput()
    greedy: Throughput = Throughput()
    # Since when plans are in use; None: they are not.
    tried: float | None = None
    # Plans are not used before ``rest_until``; before ``rest_floor`` whatever changes.
    rest_until: float = -math.inf
    rest_floor: float = -math.inf
    # Failed trials since the last that did not fail; whether the rest is a probe.
    failures: int = 0
    probing: bool = False
    # Seconds that plans are in use before the next probe; 0: not known yet.
    probe_after: float = 0.0

    def with_round(self, tokens: int, seconds: float, rate: float, users: int) -> PlanComparison:
        """A round has ended; as in ``Throughput``."""
        if self.tried is None:
            return replace(self, greedy=self.greedy.with_round(tokens, seconds, rate, users))
        return replace(self, plans=self.plans.with_round(tokens, seconds, rate, users))

    def plans_used(self, now: float) -> PlanComparison:
        """Plans are in use from now on, unless they were already."""
        if self.tried is not None:
            return self
        return replace(self, tried=now, rest_until=-math.inf, probing=False)

    def greedy_used(self) -> PlanComparison:
        """Greedy batching is in use, because it is forecast to be better."""
        return replace(self, tried=None)

    def retry_at(self, *, changed: bool) -> float:
        """From when on plans may be used. ``changed``: the planner's input differs noticeably from
        the one for which plans have failed."""
        return self.rest_floor if changed and not self.probing else self.rest_until

    def plans_failed(self, users: int) -> bool:
        """Whether plans surely bring less than greedy batching does or would."""
        if self.tried is None or self.plans.rounds < MIN_TRIAL_CYCLES * users:
            return False
        return self.plans.share + self.plans.uncertainty(users) < self.greedy.prior_share

    def after_failure(self, now: float, users: int) -> PlanComparison:
        """Plans rest, and are measured anew after it."""
        assert self.tried is not None
        rest = REST_FACTOR * max(now - self.tried, self.plans.seconds / max(1, users))
        return PlanComparison(
            greedy=self.greedy,
            rest_floor=now + rest,
            rest_until=now + rest * 2.0**self.failures,
            failures=min(MAX_DOUBLINGS, self.failures + 1),
        )

    def probe_due(self, now: float, period: float) -> bool:
        """Whether it is time to probe greedy batching; ``period`` of the plan in seconds."""
        return self.tried is not None and now - self.tried >= max(
            self.probe_after, FIRST_PROBE * period
        )

    def probe_started(self, now: float) -> PlanComparison:
        """Greedy batching is used for a probe. A trial as long as this has not failed."""
        assert self.tried is not None
        used = now - self.tried
        until = now + PROBE_SHARE * used
        return PlanComparison(
            *(self.plans, self.greedy),
            rest_floor=until,
            rest_until=until,
            probing=True,
            probe_after=2 * used,
        )
