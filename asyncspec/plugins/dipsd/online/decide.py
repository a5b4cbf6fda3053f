"""Planning for a running pipeline: a plan, or greedy batching.

A rotation makes every user wait for others; work-conserving batching makes no user wait, and is
close behind most plans (docs/plugins/dip-sd.md). So a plan has to be better by a margin, or
greedy batching is kept and the decision is about draft lengths only.
"""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec.planning import MAX_JITTER, Decision
from asyncspec.plugins.dipsd.evaluate import evaluate
from asyncspec.plugins.dipsd.model import Deployment, Plan, Tables
from asyncspec.plugins.dipsd.optimizer.planner import plan_best
from asyncspec.plugins.dipsd.simulation import (
    QUIET,
    Noise,
    best_greedy,
    simulate_greedy,
    simulate_plan,
)

MARGIN = 0.03
"""By this share a plan's tokens a second have to be above those of greedy batching."""

EFFORT = 0.1
"""Share of the work that ``asyncspec plan`` does: up to 64 users take about a second."""

RUNS, MIN_RUNS, MAX_RUNS = 600, 4, 100
"""Rounds of all users together in each simulation, and of each user at least and at most."""

SKETCH = 4
"""The length for all is first looked for by simulations so much shorter, without jitter."""


def decide(deployment: Deployment, noise: Noise = QUIET) -> Decision:
    """A plan if it is worth it, for users whose memory fits (a ``measured_deployment``).

    Lengths are chosen by the deployment's cautious chances, and both forecasts are of what those
    lengths bring by the mean ones (``noise.alphas``), with the jitter that was measured: a rotation
    waits for the slowest member of each batch.
    """
    tables = Tables(deployment)
    rounds = max(MIN_RUNS, min(MAX_RUNS, RUNS // tables.users))
    noise = replace(noise, sigma=min(MAX_JITTER, noise.sigma), expected=True)
    result = plan_best(tables, effort=EFFORT)
    assert result is not None, "each user alone fits"
    candidates = [planned_lengths := result.plan.lengths]
    if tables.users > 1:
        common, _ = best_greedy(tables, max(MIN_RUNS, rounds // SKETCH))
        near = range(max(1, common - 1), min(tables.longest, common + 1) + 1)
        candidates = [*((length,) * tables.users for length in near), planned_lengths]
    runs = [(simulate_greedy(tables, lengths, rounds, noise), lengths) for lengths in candidates]
    greedy, lengths = max(runs, key=lambda run: run[0].throughput)
    planned, period = _forecast(result.plan, tables, rounds, noise)
    pays = planned > greedy.throughput * (1 + MARGIN)
    return Decision(
        lengths=planned_lengths if pays else lengths,
        groups=result.plan.batches if pays else (),
        period_ms=period,
        planned=planned,
        greedy=greedy.throughput,
        greedy_lengths=lengths,
        greedy_by_user=greedy.by_user,
    )


def _forecast(plan: Plan, tables: Tables, rounds: int, noise: Noise) -> tuple[float, float]:
    """(tokens a second, ms a cycle): exact on machines that are as measured, else simulated."""
    if noise.quiet and noise.alphas is None:
        evaluation = evaluate(plan, tables)
        return evaluation.throughput, evaluation.period_ms
    run = simulate_plan(plan, tables, rounds, noise)
    return run.throughput, run.period_ms
