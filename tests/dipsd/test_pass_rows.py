"""PlanResult batches fit in a pass: of more rows the rest would have the next one."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.plugins.dipsd.evaluate import evaluate
from asyncspec.plugins.dipsd.model import Deployment, Plan, Tables, User
from asyncspec.plugins.dipsd.online.decide import EFFORT, decide
from asyncspec.plugins.dipsd.online.request import measured_deployment
from asyncspec.plugins.dipsd.optimizer.association import associations
from asyncspec.plugins.dipsd.optimizer.baselines import algorithm1
from asyncspec.plugins.dipsd.optimizer.planner import FEW, plan_best
from asyncspec.plugins.dipsd.simulation import simulate_greedy
from dipsd.deployments import deployments
from effort import examples


def crowd(users: int, seed: int, rows: int) -> Deployment:
    """Passes that hardly cost more for many rows: without a limit there are few large batches."""
    random = Random(f"{users} {seed}")
    people = [
        User("u", random.uniform(0.5, 0.95), 0, random.uniform(1, 9), random.uniform(0, 20))
        for _ in range(users)
    ]
    return measured_deployment(people, [(60.0, 0.05), (30.0, 0.05)], rows)


def padded(plan: Plan) -> list[int]:
    """Rows of each batch by its longest draft: there are no more."""
    return [len(users) * (max(plan.lengths[m] for m in users) + 1) for users in plan.batches]


def check_fits(plan: Plan, rows: int) -> None:
    """A user alone has a pass of his own, however long his draft is."""
    shared = zip(plan.batches, padded(plan), strict=True)
    assert all(count <= rows for users, count in shared if len(users) > 1)


@given(deployments(most=FEW), st.integers(1, 30))
@settings(max_examples=examples(150, quick=30))
def test_no_batch_has_more_rows_than_fit_in_a_pass(deployment: Deployment, rows: int) -> None:
    tables = Tables(replace(deployment, batch_rows=rows))
    for found in (plan_best(tables), plan_best(tables, few=0), algorithm1(tables)):
        if found is not None:
            check_fits(found.plan, rows)
            if rows > deployment.longest:  # then everybody fits alone
                assert max(padded(found.plan)) <= rows


@given(st.integers(FEW + 1, 40), st.integers(0, 99), st.integers(1, 200))
@settings(max_examples=examples(20, quick=5))
def test_plans_of_many_users_fit_a_pass(users: int, seed: int, rows: int) -> None:
    found = plan_best(Tables(crowd(users, seed, rows)), effort=EFFORT)
    assert found is not None
    check_fits(found.plan, rows)


@given(deployments(most=4, longest=5), st.integers(0, 9))
@settings(max_examples=examples(100, quick=25))
def test_with_room_for_all_rows_the_plan_is_the_same(deployment: Deployment, more: int) -> None:
    rows = len(deployment.users) * (deployment.longest + 1) + more
    for few in (0, FEW):
        limited = plan_best(Tables(replace(deployment, batch_rows=rows)), few=few)
        assert limited == plan_best(Tables(deployment), few=few)


def test_decisions_for_many_users_fit_a_pass() -> None:
    assert decide(crowd(12, 1, 12 * 21)) == decide(crowd(12, 1, 0))
    assert max(padded(plan_of_decision(crowd(12, 1, 0)))) > 40
    assert max(padded(plan_of_decision(crowd(12, 1, 40)))) <= 40


def plan_of_decision(deployment: Deployment) -> Plan:
    found = plan_best(Tables(deployment), effort=EFFORT)
    assert found is not None
    return found.plan


@given(deployments(most=3, stages=1, longest=4), st.integers(1, 12))
@settings(max_examples=60)
def test_the_plan_is_the_best_that_fits(deployment: Deployment, rows: int) -> None:
    tables = Tables(replace(deployment, batch_rows=rows))
    rates = [0.0]
    lengths = range(1, deployment.longest + 1)
    for groups in associations(tables.users):
        if Tables(deployment).all_fit(groups):
            for drawn in product(lengths, repeat=tables.users):
                plan = Plan(groups, drawn)
                pairs = zip(groups, padded(plan), strict=True)
                if all(len(group) == 1 or count <= rows for group, count in pairs):
                    rates.append(evaluate(plan, tables).throughput)
    ours = plan_best(tables)
    rate = 0.0 if ours is None else evaluate(ours.plan, tables).throughput
    assert rate == pytest.approx(max(rates))


@pytest.mark.parametrize(("rows", "ms"), [(0, 22), (12, 22), (9, 16), (7, 14), (1, 14)])
def test_greedy_batching_takes_no_more_than_fit_either(rows: int, ms: float) -> None:
    """Three users whose drafts take no time, with four rows each: together, two and one, alone."""
    people = [User("u", 0.5, 0, 1e-3)] * 3
    tables = Tables(measured_deployment(people, [(10.0, 1.0)], rows))
    assert simulate_greedy(tables, [3, 3, 3], 40).period_ms == pytest.approx(ms, rel=0.01)


def test_a_small_request_may_pass_one_that_does_not_fit() -> None:
    people = [User("u", 0.5, 0, 1e-3)] * 3
    tables = Tables(measured_deployment(people, [(10.0, 1.0)], 9))
    # The first and the third have four rows each, the second has nine.
    run = simulate_greedy(tables, [3, 8, 3], 40)
    assert run.period_ms == pytest.approx((10 + 2 * 4 + 10 + 9) / 2, rel=0.01)
