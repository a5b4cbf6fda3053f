"""Whether what is measured has changed so much that a plan for it may be another one. Pure."""

from __future__ import annotations

from asyncspec.dipsd.decide import Planning
from asyncspec.dipsd.model import Deployment, User
from asyncspec.dipsd.noise import Deviations, Noise

DRIFT = 0.15
"""A change by this share of a round, of a pass or of what is left of a chance to 1 or 0 is worth a
new plan: more than draft nodes take for news, so that what wavers about a bound changes nothing."""


def drifted(old: Planning, new: Planning) -> bool:
    """Whether a plan for the one may not be good for the other."""
    if old.sessions != new.sessions or _shakier(old.noise, new.noise):
        return True
    before, after = old.deployment, new.deployment
    users = zip(before.users, after.users, strict=True)
    return any(_other(a, b) for a, b in users) or _slower(before, after)


def _shakier(old: Noise, new: Noise) -> bool:
    """Whether jitter is another, of all users' drafts or links together or of all passes: of each
    by itself it wavers."""
    before, after = _means(old.deviations), _means(new.deviations)
    return any(abs(b - a) > DRIFT / 2 for a, b in zip(before, after, strict=True))


def _means(deviations: Deviations | None) -> tuple[float, ...]:
    rows = deviations or Deviations((), (), ())
    return tuple(sum(r) / max(1, len(r)) for r in (rows.drafts, rows.links, rows.passes))


def _other(old: User, new: User) -> bool:
    room = DRIFT * 2 * min(old.alpha, 1 - old.alpha)
    if abs(new.alpha - old.alpha) > max(0.03, room):
        return True
    whole = DRIFT * max(1e-6, 4 * old.token_ms + old.link_ms)
    return 4 * abs(new.token_ms - old.token_ms) > whole or abs(new.link_ms - old.link_ms) > whole


def _slower(old: Deployment, new: Deployment) -> bool:
    """Whether some stage's passes over a few rows a user take noticeably longer or shorter."""
    rows = 4 * len(old.users)
    for a, b in zip(old.verifier.stages, new.verifier.stages, strict=True):
        before = a.fixed_ms + a.ms_per_flop / len(old.verifier.stages) * rows
        after = b.fixed_ms + b.ms_per_flop / len(old.verifier.stages) * rows
        if abs(after - before) > DRIFT * before:
            return True
    return False
