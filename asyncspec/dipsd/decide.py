"""Planning for a running pipeline: the planner's input, its decision, and when it is outdated.

A rotation makes every user wait for others; work-conserving batching makes nobody wait, and is
close behind most plans (docs/reference/dip-sd.md). So a plan has to be better by a margin, or
greedy batching is kept and the decision is about draft lengths only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.dipsd.evaluate import evaluate
from asyncspec.dipsd.model import Deployment, Groups, ModelShape, Plan, StageProfile, User, Verifier
from asyncspec.dipsd.planner import plan_best
from asyncspec.dipsd.simulation import (
    QUIET,
    Deviations,
    Noise,
    best_greedy,
    simulate_greedy,
    simulate_plan,
)
from asyncspec.dipsd.tables import Tables
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.limits import MAX_DRAFT_LENGTH
from asyncspec_protocol.messages import Rates

MARGIN = 0.03
"""By this share a plan's tokens a second have to be above those of greedy batching."""

EFFORT = 0.1
"""Of the work that ``asyncspec plan`` does for more than a handful of users."""

RUNS, MAX_RUNS = 600, 100
"""Rounds of all users together in each simulation, and of each of them at most."""

MAX_JITTER = 1.0
"""Bound of any relative deviation: a draft node may say what it likes."""

SKETCH = 4
"""The length for all is first looked for by simulations so much shorter, without jitter."""


class RowCount(ModelShape, frozen=True):
    """A target whose passes were measured by rows: its work is the rows of a pass, one for each
    drafted token and one for the root. Prefixes cost nothing."""

    def flops(self, tokens: int, prefix: int) -> float:
        return tokens + 1.0


class PlanRequest(Struct, frozen=True):
    """A request: the users of ``deployment`` are these sessions. ``noise`` is what their times
    are measured to vary by, and their mean acceptance: the deployment's is a cautious one."""

    sessions: tuple[SessionId, ...]
    deployment: Deployment
    noise: Noise = Noise()


class Decision(Struct, frozen=True):
    """What is best: who is verified together, with drafts of which ``lengths``; nobody in
    particular where ``groups`` is empty. Forecasts in tokens a second, of the best plan and of
    greedy batching: the latter with its own lengths and by user, for it may be used instead."""

    lengths: tuple[int, ...]
    groups: Groups
    period_ms: float
    planned: float
    greedy: float
    greedy_lengths: tuple[int, ...]
    greedy_by_user: tuple[float, ...]


MIN_MS, MAX_MS = 1e-3, 1e6
"""Bounds of any time, in ms: a draft node may say what it likes, and the answer is a plan."""


def clamp_ms(ms: float) -> float:
    """A time that can be planned with."""
    return min(max(MIN_MS, ms), MAX_MS)


def measured_deployment(
    users: Sequence[User], stages: Sequence[tuple[float, float]], batch_rows: int = 0
) -> Deployment:
    """The deployment of ``users`` and stages whose passes take (fixed ms, ms a row), of at most
    ``batch_rows`` rows; 0: of any number."""
    count = len(stages)
    verifier = Verifier(
        RowCount(count, 1, 1),
        # A stage of one layer of ``count`` is charged that share of a FLOP.
        tuple(StageProfile(1, count * min(row, MAX_MS), clamp_ms(fixed)) for fixed, row in stages),
    )
    return Deployment(tuple(users), verifier, MAX_DRAFT_LENGTH, batch_rows)


def decide(deployment: Deployment, noise: Noise = QUIET) -> Decision:
    """A plan if it is worth it. Up to sixty-four users take about a second, whatever they are like.

    Lengths are chosen by the deployment's cautious chances, and both forecasts are of what those
    lengths bring by the mean ones (``noise.alphas``), with the jitter that was measured: a rotation
    waits for the slowest member of each batch.
    """
    tables = Tables(deployment)
    rounds = max(4, min(MAX_RUNS, RUNS // tables.users))
    noise = _bounded(noise)
    found = plan_best(tables, effort=EFFORT)
    if tables.users == 1 and found is not None:
        return _alone(found.plan.lengths[0], tables, rounds, noise)
    common, _ = best_greedy(tables, max(4, rounds // SKETCH))
    near = range(max(1, common - 1), min(tables.longest, common + 1) + 1)
    candidates = [(length,) * tables.users for length in near]
    if found is not None:
        own = found.plan.lengths
        candidates.append(tuple(own[m] for m in range(tables.users)))
    runs = [simulate_greedy(tables, lengths, rounds, noise) for lengths in candidates]
    best = max(range(len(runs)), key=lambda n: runs[n].throughput)
    lengths, greedy = candidates[best], runs[best]
    groups: Groups = ()
    planned, period = 0.0, 0.0
    if found is not None:
        planned, period = _forecast(found.plan, tables, rounds, noise)
        if planned > greedy.throughput * (1 + MARGIN):
            groups = found.plan.groups
    return Decision(
        lengths=candidates[-1] if groups else lengths,
        groups=groups,
        period_ms=period,
        planned=planned,
        greedy=greedy.throughput,
        greedy_lengths=lengths,
        greedy_by_user=greedy.by_user,
    )


def _alone(length: int, tables: Tables, rounds: int, noise: Noise) -> Decision:
    """One user waits for nobody, plan or none: what matters is the length."""
    run = simulate_greedy(tables, (length,), rounds, noise)
    return Decision(
        (length,), (), run.period_ms, run.throughput, run.throughput, (length,), run.by_user
    )


def _forecast(plan: Plan, tables: Tables, rounds: int, noise: Noise) -> tuple[float, float]:
    """(tokens a second, ms a cycle): exact on machines that are as measured, else simulated."""
    if noise.quiet and noise.alphas is None:
        evaluation = evaluate(plan, tables)
        return evaluation.throughput, evaluation.period_ms
    run = simulate_plan(plan, tables, rounds, noise)
    return run.throughput, run.period_ms


def _bounded(noise: Noise) -> Noise:
    deviations = noise.deviations
    if deviations is not None:
        tables = (deviations.drafts, deviations.links, deviations.passes)
        deviations = Deviations(*(tuple([min(MAX_JITTER, d) for d in row]) for row in tables))
    sigma = min(MAX_JITTER, noise.sigma)
    return replace(noise, sigma=sigma, expected=True, deviations=deviations)


StageCosts = Sequence[tuple[float, float, float]]
"""Of each: (seconds of a pass, seconds of each of its rows, relative deviation)."""


def plan_request(
    told: Sequence[Rates], stages: StageCosts, names: Sequence[str] = (), batch_rows: int = 0
) -> PlanRequest:
    """What is to be planned for users of whom that is told, named by their sessions or as given,
    with passes of at most ``batch_rows`` rows (0: of any number).

    Lengths are planned for cautious chances, and what they bring is forecast by the mean ones.
    """
    names = names or [str(rates.session) for rates in told]
    users = [_user(name, rates) for name, rates in zip(names, told, strict=True)]
    deviations = Deviations(
        drafts=tuple([rates.jitter for rates in told]),
        links=tuple(map(_link_jitter, told)),
        passes=tuple([jitter for _, _, jitter in stages]),
    )
    # Nodes from before there was a mean tell the cautious chance alone.
    alphas = tuple([max(rates.alpha, rates.mean) for rates in told])
    passes = [(1000 * fixed, 1000 * row) for fixed, row, _ in stages]
    return PlanRequest(
        tuple([rates.session for rates in told]),
        measured_deployment(users, passes, batch_rows),
        Noise(alphas=alphas, deviations=deviations),
    )


def _user(name: str, rates: Rates) -> User:
    return User(
        name,
        rates.alpha,
        0,
        clamp_ms(1000 * rates.token_seconds),
        clamp_ms(1000 * (rates.call_seconds + rates.link_seconds)),
    )


def _link_jitter(rates: Rates) -> float:
    """The relative deviation of what a round takes whatever its length: the links, and the call of
    the source."""
    whole = rates.call_seconds + rates.link_seconds
    if not 0 < whole < math.inf:
        return 0.0
    links = rates.link_jitter * (rates.link_seconds / whole)
    return math.hypot(links, rates.jitter * (rates.call_seconds / whole))


DRIFT = 0.15
"""A change by this share of a round, of a pass or of what is left of a chance to 1 or 0 is worth a
new plan: more than draft nodes take for news, so that what wavers about a bound changes nothing."""


def drifted(old: PlanRequest, new: PlanRequest) -> bool:
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
