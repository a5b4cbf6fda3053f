"""The planner's input for a running pipeline, and when it is outdated."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from asyncspec.planning import MAX_JITTER, MAX_SECONDS, StageCosts
from asyncspec.plugins.dipsd.model import (
    Deployment,
    ModelShape,
    StageProfile,
    User,
    Verifier,
)
from asyncspec.plugins.dipsd.simulation import Deviations, Noise
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.limits import MAX_DRAFT_LENGTH
from asyncspec_protocol.messages import Rates

MIN_MS, MAX_MS = 1e-3, 1000 * MAX_SECONDS
"""Bounds of any time in ms, whatever a draft node reports."""


class RowCount(ModelShape, frozen=True):
    """A target whose passes were measured by rows: its work is the rows of a pass, one for each
    drafted token and one for the root. Prefixes cost nothing."""

    def flops(self, tokens: int, prefix: int) -> float:
        return tokens + 1.0


class PlanRequest(Struct, frozen=True):
    """A request: the users of ``deployment`` are these sessions, with cautious acceptance.
    ``noise`` has the measured deviations and the mean acceptance."""

    sessions: tuple[SessionId, ...]
    deployment: Deployment
    noise: Noise = Noise()


def clamp_ms(ms: float) -> float:
    """A time that can be planned with."""
    return min(max(MIN_MS, ms), MAX_MS)


def measured_deployment(
    users: Sequence[User], stages: Sequence[tuple[float, float]], batch_rows: int = 0
) -> Deployment:
    """The deployment of ``users`` and stages whose passes take (fixed ms, ms a row), of at most
    ``batch_rows`` rows; 0: of any number."""
    count = len(stages)
    # A stage of one layer of ``count`` is charged that share of a FLOP.
    profiles = (StageProfile(1, count * min(row, MAX_MS), clamp_ms(fixed)) for fixed, row in stages)
    verifier = Verifier(RowCount(count, 1, 1), tuple(profiles))
    return Deployment(tuple(users), verifier, MAX_DRAFT_LENGTH, batch_rows)


def plan_request(
    measured: Sequence[Rates], stages: StageCosts, names: Sequence[str] = (), batch_rows: int = 0
) -> PlanRequest:
    """The request for users with these rates, named by their sessions or as given, and passes of at
    most ``batch_rows`` rows (0: of any number)."""
    names = names or [str(rates.session) for rates in measured]
    users = [
        User(
            *(name, rates.alpha, 0, clamp_ms(1000 * rates.token_seconds)),
            link_ms=clamp_ms(1000 * (rates.call_seconds + rates.link_seconds)),
        )
        for name, rates in zip(names, measured, strict=True)
    ]
    deviations = Deviations(
        drafts=tuple([min(MAX_JITTER, rates.jitter) for rates in measured]),
        links=tuple([min(MAX_JITTER, _round_jitter(rates)) for rates in measured]),
        passes=tuple([min(MAX_JITTER, jitter) for _, _, jitter in stages]),
    )
    # Older nodes report the cautious chance alone.
    alphas = tuple([max(rates.alpha, rates.mean) for rates in measured])
    passes = [(1000 * fixed, 1000 * row) for fixed, row, _ in stages]
    return PlanRequest(
        tuple([rates.session for rates in measured]),
        measured_deployment(users, passes, batch_rows),
        Noise(alphas=alphas, deviations=deviations),
    )


def _round_jitter(rates: Rates) -> float:
    """The relative deviation of a round's fixed time: links and the source's call."""
    whole = rates.call_seconds + rates.link_seconds
    if not 0 < whole < math.inf:
        return 0.0
    links = rates.link_jitter * (rates.link_seconds / whole)
    return math.hypot(links, rates.jitter * (rates.call_seconds / whole))


DRIFT = 0.15
"""A change by this share of a round, of a pass or of what is left of a chance to 1 or 0 is worth a
new plan: more than draft nodes report at, so that an estimate that wavers changes nothing."""

MIN_ALPHA_DRIFT = 0.03
"""Less than that is noise in any acceptance."""

ROUND_TOKENS = 4
"""Tokens of a draft, and rows a user, for which durations are compared."""


def drifted(old: PlanRequest, new: PlanRequest) -> bool:
    """Whether a plan for the one may not be good for the other."""
    if old.sessions != new.sessions:
        return True
    # Mean over all users or stages: each by itself wavers.
    jitters = zip(_mean_jitters(old.noise), _mean_jitters(new.noise), strict=True)
    users = zip(old.deployment.users, new.deployment.users, strict=True)
    passes = zip(_passes_ms(old.deployment), _passes_ms(new.deployment), strict=True)
    return (
        any(abs(after - before) > DRIFT / 2 for before, after in jitters)
        or any(_user_drifted(before, after) for before, after in users)
        or any(abs(after - before) > DRIFT * before for before, after in passes)
    )


def _mean_jitters(noise: Noise) -> list[float]:
    return [sum(row) / max(1, len(row)) for row in noise.deviations or Deviations()]


def _user_drifted(old: User, new: User) -> bool:
    room = DRIFT * 2 * min(old.alpha, 1 - old.alpha)
    if abs(new.alpha - old.alpha) > max(MIN_ALPHA_DRIFT, room):
        return True
    change = DRIFT * max(1e-6, ROUND_TOKENS * old.token_ms + old.link_ms)
    drafts, links = new.token_ms - old.token_ms, new.link_ms - old.link_ms
    return max(ROUND_TOKENS * abs(drafts), abs(links)) > change


def _passes_ms(deployment: Deployment) -> list[float]:
    """Milliseconds of a pass with a few rows of every user, by stage."""
    stages, rows = deployment.verifier.stages, ROUND_TOKENS * len(deployment.users)
    return [stage.fixed_ms + stage.ms_per_flop / len(stages) * rows for stage in stages]
