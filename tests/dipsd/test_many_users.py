"""Many users, whatever they are like: planning takes no longer, and beats what is simple."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import permutations, product
from random import Random
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.plugins.dipsd.evaluate import evaluate
from asyncspec.plugins.dipsd.model import Budget, Deployment, Groups, Tables, User, violation
from asyncspec.plugins.dipsd.online.decide import EFFORT, decide
from asyncspec.plugins.dipsd.online.request import clamp_ms, measured_deployment
from asyncspec.plugins.dipsd.optimizer.association import dealt
from asyncspec.plugins.dipsd.optimizer.baselines import one_batch
from asyncspec.plugins.dipsd.optimizer.lengths import best_lengths
from asyncspec.plugins.dipsd.optimizer.planner import plan_best
from asyncspec.plugins.dipsd.optimizer.search import BatchChange, BatchFit
from dipsd.deployments import deployments
from effort import nightly

MAX_CALLS = 8_000_000
"""Calls and returns of functions: about a second, counted so that a busy machine is no slower."""


def different(users: int, stages: int, seed: int) -> Deployment:
    """Devices a factor of 32 apart, links of 256, stages of 12 and rows of 60."""
    random = Random(f"{users} {stages} {seed}")
    people = [
        User(
            "u",
            random.uniform(0.1, 0.97),
            0,
            5 * 2 ** random.uniform(0, 5),
            2 ** random.uniform(0, 8),
        )
        for _ in range(users)
    ]
    passes = [(random.uniform(5, 60), random.uniform(0.1, 6)) for _ in range(stages)]
    return measured_deployment(people, passes)


def extreme(users: int, stages: int, seed: int) -> Deployment:
    """Anything that a draft node may say."""
    random = Random(f"extreme {users} {stages} {seed}")

    def drawn(low: float, high: float) -> float:
        return clamp_ms(10 ** random.uniform(low, high))

    chances = (0.0, 0.01, 0.5, 0.99, 1.0)
    people = [
        User("u", random.choice(chances), 0, drawn(-3, 6), drawn(-3, 6)) for _ in range(users)
    ]
    return measured_deployment(people, [(drawn(-3, 4), drawn(-3, 3)) for _ in range(stages)])


def calls(deployment: Deployment) -> int:
    """Of functions, and returns from them, that a decision takes."""
    count = 0

    def event(frame: FrameType, what: str, of: object) -> None:
        nonlocal count
        count += 1
        if count > MAX_CALLS:
            pytest.fail(f"more than {MAX_CALLS:,} calls")

    before = sys.getprofile()
    sys.setprofile(event)
    try:
        decide(deployment)
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("users", "stages"), [nightly(16, 6), nightly(40, 6), (64, 6), nightly(64, 1), (12, 2)]
)
@pytest.mark.parametrize("kind", [different, extreme])
def test_a_decision_takes_no_longer_whatever_users_are_like(
    kind: object, users: int, stages: int
) -> None:
    assert callable(kind)
    assert calls(kind(users, stages, 1)) <= MAX_CALLS


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.sampled_from([different, extreme]), st.integers(7, 40), st.integers(1, 4), st.integers())
def test_plans_of_little_effort_are_plans_and_pass_what_is_simple(
    kind: object, users: int, stages: int, seed: int
) -> None:
    assert callable(kind)
    tables = Tables(kind(users, stages, seed))
    # A hundredth of a decision's: the first impression is all there is.
    found = plan_best(tables, effort=EFFORT / 100)
    assert found is not None
    assert violation(found.plan, tables.deployment) == ""
    rate = evaluate(found.plan, tables).throughput
    assert rate <= found.bound * (1 + 1e-9)
    alone = best_lengths(tables, tuple((m,) for m in range(users)), work=Budget(0))
    assert alone is not None
    least = max(one_batch(tables) or 0.0, evaluate(alone.plan, tables).throughput)
    assert rate >= least * (1 - 1e-9)
    assert plan_best(tables, effort=EFFORT / 100) == found


@given(deployments(most=5))
@settings(max_examples=30, deadline=None)
def test_a_decisions_search_finds_nearly_the_optimum_of_a_few(deployment: Deployment) -> None:
    tables = Tables(deployment)
    best, found = plan_best(tables), plan_best(tables, few=0, effort=EFFORT)
    assert (best is None) == (found is None)
    if best is not None and found is not None:
        rate = evaluate(best.plan, tables).throughput
        assert evaluate(found.plan, tables).throughput >= 0.97 * rate


def neighbours(groups: Groups) -> Iterator[Groups]:
    """Every move and every swap, with as many batches as before."""
    for left, right in permutations(range(len(groups)), 2):
        for m, other in product(groups[left], (None, *groups[right])):
            if other is not None or len(groups[left]) > 1:
                pair = dict(
                    zip((left, right), BatchChange(m, other, left, right).of(groups), strict=True)
                )
                yield tuple(pair.get(n, group) for n, group in enumerate(groups))


@given(deployments(most=7), st.integers(1, 7), st.floats(0.5, 4), st.sampled_from([0.0, 1e-13]))
@settings(max_examples=60, deadline=None)
def test_no_move_or_swap_improves_what_was_fitted(
    deployment: Deployment, batches: int, longer: float, price: float
) -> None:
    tables = Tables(deployment)
    start = dealt(range(tables.users), min(batches, tables.users))
    if not tables.all_fit(start):
        return
    found = best_lengths(tables, start)
    assert found is not None
    fit, work = BatchFit(tables), Budget(1e9)
    groups = fit.climb(start, longer * found.period, price, work)

    def worth(those: Groups) -> float:
        return sum(fit.worth(group, price) for group in those)

    assert worth(groups) >= worth(start) - 1e-6
    if len(set(tables.prefix)) == 1 and tables.capacity == float("inf"):
        most = max((worth(other) for other in neighbours(groups)), default=worth(groups))
        assert most <= worth(groups) + 1e-6
    # And no step is taken that is not allowed.
    assert fit.climb(start, longer * found.period, price, Budget(0)) == start
