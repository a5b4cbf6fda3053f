"""What plans are compared with, and the paper's headline ratios."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.plugins.dipsd.evaluate import evaluate
from asyncspec.plugins.dipsd.model import Deployment, PlanResult, Tables, paper
from asyncspec.plugins.dipsd.optimizer.baselines import BASELINES, algorithm1
from asyncspec.plugins.dipsd.optimizer.planner import plan_best
from asyncspec.plugins.dipsd.simulation import Noise, best_greedy, simulate_greedy
from dipsd.deployments import deployments

Planner = Callable[[Tables], PlanResult | None]


def rate_of(name: str, tables: Tables) -> float:
    rate = BASELINES[name](tables)
    assert rate is not None
    return rate


@pytest.mark.parametrize("planner", [plan_best, algorithm1])
@pytest.mark.parametrize(
    ("users", "alpha", "over_ad", "over_ad_greedy"),
    [(14, 0.78, 17.889, 1.378), (6, 0.95, 11.248, 1.931)],
)
def test_the_headline_ratios(
    planner: Planner, users: int, alpha: float, over_ad: float, over_ad_greedy: float
) -> None:
    tables = Tables(paper(users, alpha))
    planned = planner(tables)
    assert planned is not None
    rate = evaluate(planned.plan, tables).throughput
    assert rate / rate_of("ad", tables) == pytest.approx(over_ad, abs=5.1e-4)
    assert rate / rate_of("ad_greedy", tables) == pytest.approx(over_ad_greedy, abs=5.1e-4)


def test_the_papers_baselines() -> None:
    tables = Tables(paper(6))
    rates = {name: rate_of(name, tables) for name in BASELINES}
    assert rates["ad"] == pytest.approx(10.451, abs=5e-4)
    assert rates["ad_greedy"] == pytest.approx(60.88, abs=5e-3)
    ours = 83.8
    assert ours / rates["one_batch"] == pytest.approx(1.011, abs=2e-3)
    assert ours / rates["fixed_length"] == pytest.approx(1.223, abs=2e-3)
    assert ours / rates["unbatched"] == pytest.approx(1.95, abs=5e-3)


def test_rotation_loses_where_guesses_are_poor() -> None:
    tables = Tables(paper(6, 0.5))
    theirs, ours = algorithm1(tables), plan_best(tables)
    assert theirs is not None
    assert ours is not None
    rate = evaluate(theirs.plan, tables).throughput
    assert rate / rate_of("ad_greedy", tables) == pytest.approx(0.901, abs=1e-3)
    assert rate / rate_of("one_batch", tables) == pytest.approx(0.826, abs=1e-3)
    assert len(ours.plan.batches) == 1


def test_batched_decoding_goes_round_on_several_stages() -> None:
    one, four = (Tables(paper(8, stages=n)) for n in (1, 4))
    assert rate_of("ad", four) == pytest.approx(rate_of("ad", one))
    assert rate_of("ad_greedy", four) > rate_of("ad_greedy", one)


@given(deployments(most=4))
@settings(max_examples=60)
def test_no_baseline_that_drafts_passes_the_bound(deployment: Deployment) -> None:
    tables = Tables(deployment)
    ours = plan_best(tables)
    if ours is not None:
        for name in ("one_batch", "fixed_length", "round_robin"):
            rate = BASELINES[name](tables)
            assert rate is None or rate <= ours.bound * (1 + 1e-9)


@given(deployments(most=5), st.integers(0, 3))
@settings(max_examples=30)
def test_greedy_batching_serves_every_user(deployment: Deployment, seed: int) -> None:
    tables = Tables(deployment)
    if not tables.all_fit([(m,) for m in range(tables.users)]):
        return
    seen = simulate_greedy(tables, [1] * tables.users, 20, Noise(0.2, seed))
    assert seen.throughput > 0
    assert max(seen.busy) <= 1 + 1e-9


def test_greedy_batching_of_one_user_is_a_plan_of_one_user() -> None:
    tables = Tables(paper(1))
    length, seen = best_greedy(tables)
    ours = plan_best(tables)
    assert ours is not None
    assert ours.plan.lengths == (length,)
    assert seen.throughput == pytest.approx(evaluate(ours.plan, tables).throughput)
