"""Plans against greedy batching by what they bring: over a long run the better one is used."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncspec.core.rng import uniform
from asyncspec_nodes.roles.verify.plan_comparison import (
    MAX_DOUBLINGS,
    REST_FACTOR,
    PlanComparison,
    Throughput,
)
from effort import examples

MEAN = 3.0
"""Tokens of a round."""


class Run:
    """Users in cycles of a second each. ``plan`` and ``greedy`` are what either brings, as shares
    of what greedy batching is forecast to."""

    def __init__(self, users: int, plan: float, greedy: float, seed: int) -> None:
        self.users, self.seed = users, seed
        self.true = {True: plan, False: greedy}
        self.state = PlanComparison()
        self.now, self.drawn = 0.0, 0
        self.tokens, self.spent = 0.0, {True: 0, False: 0}
        self.drops: list[float] = []

    def cycle(self, *, changed: bool = False) -> None:
        """Everybody has a round; then it is verified as the first stage judges."""
        planned = self.state.tried is not None
        self.spent[planned] += 1
        self.now += 1.0
        for _ in range(self.users):
            tokens = self.round(MEAN * self.true[planned])
            self.tokens += tokens
            self.state = self.state.with_round(tokens, 1.0, MEAN, self.users)
        if self.state.plans_failed(self.users):
            self.state = self.state.after_failure(self.now, self.users)
            self.drops.append(self.now)
        elif self.state.probe_due(self.now, 1.0):
            self.state = self.state.probe_started(self.now)
        elif self.state.tried is None and self.now >= self.state.retry_at(changed=changed):
            self.state = self.state.plans_used(self.now)

    def round(self, mean: float) -> int:
        """Geometric, of that mean, at most 20."""
        self.drawn += 1
        chance = max(1e-9, 1 - 1 / max(1.0001, mean))
        tokens = 1 + int(math.log(uniform(self.seed, self.drawn, 0)) / math.log(chance))
        return min(tokens, 20) if mean > 1 else int(uniform(self.seed, self.drawn, 1) < mean)

    @property
    def rate(self) -> float:
        """As a share of the forecast."""
        return self.tokens / (self.now * self.users * MEAN)


@pytest.mark.slow
@settings(max_examples=examples(25, quick=8), deadline=None)
@given(
    st.sampled_from((2, 6, 16)),
    st.floats(0.5, 1.3),
    st.floats(0.7, 1.2),
    st.integers(0, 99),
)
@example(6, 0.94, 1.0, 0)
@example(6, 1.0, 1.2, 0)
@example(6, 0.6, 0.7, 0)
@example(16, 0.5, 1.2, 3)
def test_the_better_batching_is_used_in_the_long_run(
    users: int, plan: float, greedy: float, seed: int
) -> None:
    run = Run(users, plan, greedy, seed)
    for _ in range(24_000 // users):
        run.cycle()
    alone = Run(users, greedy, greedy, seed)
    for _ in range(24_000 // users):
        alone.cycle()
    # Never noticeably below greedy batching.
    assert run.rate > 0.95 * alone.rate
    # And where plans are noticeably better, they are used.
    if plan > 1.15 * greedy and plan > 1.15:
        assert run.spent[True] > 4 * run.spent[False]


def test_a_plan_that_is_worse_is_tried_ever_more_seldom() -> None:
    run = Run(6, 0.7, 1.0, 1)
    for _ in range(20_000):
        run.cycle()
    in_time = [sum(start <= at < 8 * start for at in run.drops) for start in (20, 160, 1280)]
    # Without doubling the last span would have eight times as many as the one before it.
    assert in_time[0] >= 1
    assert in_time[1] >= 1
    assert 1 <= in_time[2] <= 4
    assert run.spent[True] < 0.02 * run.spent[False]


def test_constant_change_does_not_raise_the_rate_of_trials() -> None:
    run = Run(6, 0.7, 1.0, 1)
    for _ in range(5_000):
        run.cycle(changed=True)
    assert run.spent[True] < 1.3 * run.spent[False] / REST_FACTOR
    assert run.rate > 0.95


def test_a_change_ends_a_rest_but_not_a_probe() -> None:
    failed = PlanComparison(tried=0.0, failures=3).after_failure(10.0, 6)
    assert failed.retry_at(changed=True) == 10 + REST_FACTOR * 10
    assert failed.retry_at(changed=False) == 10 + 8 * REST_FACTOR * 10
    probe = PlanComparison(tried=0.0).probe_started(64.0)
    assert probe.retry_at(changed=True) == probe.retry_at(changed=False) == 64 + 4


def test_the_rest_is_bounded() -> None:
    state = PlanComparison()
    for _ in range(MAX_DOUBLINGS + 9):
        state = state.plans_used(state.rest_until if math.isfinite(state.rest_until) else 0.0)
        assert state.tried is not None
        state = state.after_failure(state.tried + 1.0, 6)
    assert state.tried is None
    assert state.rest_until - state.rest_floor < REST_FACTOR * 2**MAX_DOUBLINGS


def test_throughput_forgets() -> None:
    throughput = Throughput()
    for _ in range(5000):
        throughput = throughput.with_round(3, 1.0, 6.0, 2)
    assert throughput.share == pytest.approx(0.5, rel=0.01)
    assert throughput.rate == pytest.approx(3.0, rel=0.01)
    for _ in range(5000):
        throughput = throughput.with_round(6, 1.0, 6.0, 2)
    assert throughput.share == pytest.approx(1.0, abs=0.01)
    assert throughput.rounds < 1025


def test_without_rounds_plans_count_as_forecast() -> None:
    assert Throughput().prior_share == Throughput().share == 1.0
    assert not PlanComparison(tried=0.0).plans_failed(6)
