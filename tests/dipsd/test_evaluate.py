"""The closed form is what the events do."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asyncspec.plugins.dipsd.evaluate import evaluate, exact_period, in_best_order
from asyncspec.plugins.dipsd.model import Deployment, Plan, Tables, paper
from asyncspec.plugins.dipsd.simulation import Noise, simulate_plan
from asyncspec_nodes.plugins.dipsd.output import picture
from dipsd.deployments import planned

MEAN = Noise(expected=True)


@pytest.mark.slow
@given(planned())
@settings(max_examples=60)
def test_the_period_is_that_of_the_events(case: tuple[Deployment, Plan]) -> None:
    deployment, plan = case
    said = evaluate(plan, Tables(deployment))
    seen = simulate_plan(plan, Tables(deployment), 2000, MEAN)
    # What is left of the start-up: less than one cycle's work in a thousand cycles.
    assert seen.period_ms == pytest.approx(said.period_ms, rel=3e-3)
    assert seen.throughput == pytest.approx(said.throughput, rel=3e-3)
    assert seen.busy == pytest.approx(said.busy, rel=3e-3)
    assert sum(said.by_user) == pytest.approx(said.throughput)


@given(planned(stages=1))
def test_on_one_stage_it_is_the_papers_formula(case: tuple[Deployment, Plan]) -> None:
    deployment, plan = case
    said = evaluate(plan, Tables(deployment))
    verify = sum(batch.verify_ms for batch in said.batches)
    assert said.period_ms == max(verify, *(b.draft_ms + b.verify_ms for b in said.batches))
    assert said.limit.kind in ("stage", "batch")


@given(planned())
def test_waits_through_several_batches_only_lengthen_it(case: tuple[Deployment, Plan]) -> None:
    deployment, plan = case
    said = evaluate(plan, Tables(deployment))
    loops = [b.draft_ms + b.verify_ms for b in said.batches]
    sums = [sum(b.stages_ms[p] for b in said.batches) for p in range(len(said.busy))]
    assert said.period_ms >= max(*loops, *sums) * (1 - 1e-12)
    assert max(said.busy) <= 1 + 1e-12
    best = evaluate(in_best_order(plan, Tables(deployment)), Tables(deployment))
    assert best.period_ms <= said.period_ms


def test_order_can_matter_on_several_stages() -> None:
    drafts = [0.0, 0.0, 3.0]
    passes = [[1.5, 1.5], [0.5, 0.5], [0.1, 0.1]]
    # Loops take 3, 1 and 3.2, stages are busy for 2.1. But on its way to the second stage batch 3
    # waits behind batch 1, and batch 1 may not overtake it at the first one.
    assert exact_period(drafts, passes, 0.0) == pytest.approx(3.35)


@given(planned(), st.integers(0, 5))
@settings(max_examples=20)
def test_jitter_never_beats_a_perfect_machine_by_much(
    case: tuple[Deployment, Plan], seed: int
) -> None:
    deployment, plan = case
    tables = Tables(deployment)
    said = evaluate(plan, Tables(deployment))
    seen = simulate_plan(plan, tables, 400, Noise(0.3, seed, expected=True))
    assert seen.throughput < said.throughput * 1.15


def test_drawn_tokens_have_the_expected_mean() -> None:
    deployment = paper(6)
    plan = Plan(((0, 2, 4), (1, 3, 5)), (3,) * 6)
    said = evaluate(plan, Tables(deployment))
    seen = simulate_plan(plan, Tables(deployment), 2000)
    assert seen.throughput == pytest.approx(said.throughput, rel=0.02)
    wrong = simulate_plan(plan, Tables(deployment), 2000, Noise(alphas=(0.5,) * 6))
    assert wrong.throughput < 0.8 * seen.throughput


@given(planned())
@settings(max_examples=30)
def test_the_picture_has_a_lane_for_each_batch_and_stage(case: tuple[Deployment, Plan]) -> None:
    deployment, plan = case
    assume(len(plan.batches) <= 9)
    lines = picture(evaluate(plan, Tables(deployment)), deployment).splitlines()
    assert len(lines) == len(plan.batches) + len(deployment.verifier.stages) + 2
    drawn = [line.split(maxsplit=1)[1] for line in lines if line.startswith("V")]
    assert all(len(row) == 72 for row in drawn)
