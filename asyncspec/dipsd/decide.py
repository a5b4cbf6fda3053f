"""What a running pipeline does for the users it has measured: a plan, or greedy batching. Pure.

A rotation makes everybody wait for somebody; work-conserving batching makes nobody wait, and is
close behind most plans (docs/reference/dip-sd.md). So a plan has to be better by a margin, or
greedy batching is kept and what comes of it are the lengths of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.dipsd.cycle import simulate_plan
from asyncspec.dipsd.evaluate import evaluate_on
from asyncspec.dipsd.greedy import best_greedy, simulate_greedy
from asyncspec.dipsd.model import Deployment, Shape, Stage, User, Verifier
from asyncspec.dipsd.noise import QUIET, Deviations, Noise
from asyncspec.dipsd.plan import Groups, Plan
from asyncspec.dipsd.planner import plan_best
from asyncspec.dipsd.tables import Tables
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.limits import MAX_DRAFT_LENGTH

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


class RowCount(Shape, frozen=True):
    """A target whose passes were measured by rows: its work is the rows of a pass, one for each
    drafted token and one for the root. Prefixes cost nothing."""

    def flops(self, tokens: int, prefix: int) -> float:
        return tokens + 1.0


class Planning(Struct, frozen=True):
    """A question: the users of ``deployment`` are these sessions. ``noise`` is what their times
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


SHORTEST, LONGEST_MS = 1e-3, 1e6
"""Bounds of any time, in ms: a draft node may say what it likes, and the answer is a plan."""


def bounded(ms: float) -> float:
    """A time that can be planned with."""
    return min(max(SHORTEST, ms), LONGEST_MS)


def measured(
    users: Sequence[User], stages: Sequence[tuple[float, float]], batch_rows: int = 0
) -> Deployment:
    """The deployment of ``users`` and stages whose passes take (fixed ms, ms a row), of at most
    ``batch_rows`` rows; 0: of any number."""
    count = len(stages)
    verifier = Verifier(
        RowCount(count, 1, 1),
        # A stage of one layer of ``count`` is charged that share of a FLOP.
        tuple(Stage(1, count * min(row, LONGEST_MS), bounded(fixed)) for fixed, row in stages),
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
        evaluation = evaluate_on(plan, tables)
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
