"""The planner's optima against a MILP solver's: the same model, none of the same steps."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from asyncspec.plugins.dipsd.evaluate import batch_times, evaluate
from asyncspec.plugins.dipsd.model import Deployment, Tables, even_stages, violation
from asyncspec.plugins.dipsd.optimizer.planner import plan_best
from dipsd.deployments import deployments
from dipsd.instances import KINDS, instance
from dipsd.test_lengths import two_terms
from effort import NIGHTLY

pytest.importorskip("highspy", reason="HiGHS is not installed: pip install 'asyncspec[milp]'")

from dipsd.milp import solve

CLOSE = 1e-5


def check(deployment: Deployment) -> None:
    """Our optimum is HiGHS's, and its plan brings what it says of it."""
    tables = Tables(deployment)
    ours, theirs = plan_best(tables), solve(deployment)
    assert (ours is None) == (theirs is None)
    if ours is None or theirs is None:
        return
    assert violation(theirs.plan, deployment) == ""
    plan = theirs.plan
    assert tables.all_fit(plan.batches)
    batches = [batch_times(users, plan.lengths, tables) for users in plan.batches]
    tokens = sum(tables.gain[m][k] for m, k in enumerate(plan.lengths))
    assert theirs.ratio == pytest.approx(tokens / two_terms(batches, tables), rel=CLOSE)
    # The planner's bound is its optimum by the two terms; on one stage its plan has it.
    assert ours.bound == pytest.approx(1000 * theirs.ratio, rel=CLOSE)
    if len(deployment.verifier.stages) == 1:
        rate = evaluate(ours.plan, tables).throughput
        assert rate == pytest.approx(1000 * theirs.ratio, rel=CLOSE)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(3 if NIGHTLY else 2))
@pytest.mark.parametrize("users", [3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_ours_is_the_optimum(kind: str, users: int, seed: int) -> None:
    check(replace(instance(Random(f"milp {kind} {users} {seed}"), users, kind), longest=6))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_six_users(kind: str) -> None:
    check(replace(instance(Random(kind), 6, kind), longest=4))


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3])
def test_several_stages(stages: int) -> None:
    deployment = replace(instance(Random(stages), 4, "paper"), longest=5)
    verifier = deployment.verifier
    cut = even_stages(verifier.shape, verifier.stages[0], stages)
    check(replace(deployment, verifier=replace(verifier, stages=cut)))


@given(deployments(most=3, longest=4))
@settings(max_examples=25)
def test_any_deployment(deployment: Deployment) -> None:
    check(deployment)
