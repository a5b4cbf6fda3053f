"""What a running pipeline does for the users it has measured: a plan, or greedy batching. Pure.

A rotation makes everybody wait for somebody; work-conserving batching makes nobody wait, and is
close behind most plans (docs/dipsd.md). So a plan has to be better by a margin, or greedy batching
is kept and what comes of it are the lengths of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from asyncspec.dipsd.cycle import simulate_plan
from asyncspec.dipsd.evaluate import evaluate_on
from asyncspec.dipsd.greedy import best_greedy, simulate_greedy
from asyncspec.dipsd.model import Deployment, Shape, Stage, User, Verifier
from asyncspec.dipsd.noise import Noise
from asyncspec.dipsd.plan import Groups
from asyncspec.dipsd.planner import plan_best
from asyncspec.dipsd.presets import LONGEST
from asyncspec.dipsd.tables import Tables
from asyncspec_protocol.ids import SessionId

MARGIN = 0.03
"""By this share a plan's tokens a second have to be above those of greedy batching."""

EFFORT = 0.1
"""Of the search that ``asyncspec plan`` does for more than a handful of users."""

RUNS = 600
"""Rounds of all users together in each simulation of greedy batching."""


MOST_JITTER = 1.0


class RowCount(Shape, frozen=True):
    """A target whose passes were measured by rows: its work is the rows of a pass, one for each
    drafted token and one for the root. Prefixes cost nothing."""

    def flops(self, tokens: int, prefix: int) -> float:
        return tokens + 1.0


class Planning(Struct, frozen=True):
    """A question: the users of ``deployment`` are these sessions."""

    sessions: tuple[SessionId, ...]
    deployment: Deployment
    # The relative deviation of drafts.
    jitter: float = 0.0


class Decision(Struct, frozen=True):
    """Lengths of drafts by user, and who is verified together: nobody in particular where
    ``groups`` is empty. Forecasts in tokens a second, of the best plan and of greedy batching."""

    lengths: tuple[int, ...]
    groups: Groups
    period_ms: float
    planned: float
    greedy: float


SHORTEST, LONGEST_MS = 1e-3, 1e6
"""Bounds of any time, in ms: a draft node may say what it likes, and the answer is a plan."""


def bounded(ms: float) -> float:
    """A time that can be planned with."""
    return min(max(SHORTEST, ms), LONGEST_MS)


def measured(users: Sequence[User], stages: Sequence[tuple[float, float]]) -> Deployment:
    """The deployment of ``users`` and stages whose passes take (fixed ms, ms a row)."""
    count = len(stages)
    verifier = Verifier(
        RowCount(count, 1, 1),
        # A stage of one layer of ``count`` is charged that share of a FLOP.
        tuple(Stage(1, count * min(row, LONGEST_MS), bounded(fixed)) for fixed, row in stages),
    )
    return Deployment(tuple(users), verifier, LONGEST)


def decide(deployment: Deployment, jitter: float = 0.0) -> Decision:
    """A plan if it is worth it. Sixty-four users take about a second.

    ``jitter``: the relative deviation of drafts. A rotation waits for the slowest member of each
    batch, so both forecasts are then of simulations with it.
    """
    tables = Tables(deployment)
    rounds = max(4, RUNS // tables.users)
    noise = Noise(sigma=min(jitter, MOST_JITTER), expected=True)
    common, _ = best_greedy(tables, rounds)
    lengths, greedy = (common,) * tables.users, 0.0
    found = plan_best(tables, effort=EFFORT)
    candidates = [lengths]
    if found is not None:
        own = found.plan.lengths
        candidates.append(tuple(own[m] for m in range(tables.users)))
    for some in candidates:
        run = simulate_greedy(tables, some, rounds, noise)
        if run.throughput > greedy:
            lengths, greedy = some, run.throughput
    if found is None:
        return Decision(lengths, (), 0.0, 0.0, greedy)
    forecast = evaluate_on(found.plan, tables)
    planned, period = forecast.throughput, forecast.period_ms
    if noise.sigma:
        shaken = simulate_plan(found.plan, tables, rounds, noise)
        planned, period = shaken.throughput, shaken.period_ms
    if planned <= greedy * (1 + MARGIN):
        return Decision(lengths, (), 0.0, planned, greedy)
    return Decision(candidates[-1], found.plan.groups, period, planned, greedy)
