"""Planners against brute force, and the bound against both."""

from __future__ import annotations

from itertools import permutations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.plugins.dipsd.evaluate import evaluate
from asyncspec.plugins.dipsd.model import Deployment, Tables, violation
from asyncspec.plugins.dipsd.optimizer.association import associations, fewest_batches, packed
from asyncspec.plugins.dipsd.optimizer.baselines import (
    NODES,
    algorithm1,
    associate,
    cost,
    depth_first,
)
from asyncspec.plugins.dipsd.optimizer.bound import Bound
from asyncspec.plugins.dipsd.optimizer.lengths import best_lengths
from asyncspec.plugins.dipsd.optimizer.planner import plan_best
from dipsd.deployments import deployments
from dipsd.instances import KINDS, instance
from dipsd.test_lengths import by_enumeration


def optimum(tables: Tables, fewest: int = 1) -> float:
    """Tokens a second of the best plan on one stage: every association, exact lengths."""
    found = (
        best_lengths(tables, groups)
        for groups in associations(tables.users)
        if len(groups) >= min(fewest, tables.users)
    )
    return 1000 * max((one.ratio for one in found if one is not None), default=0.0)


def test_associations_are_the_partitions() -> None:
    assert [len(list(associations(n))) for n in range(1, 7)] == [1, 2, 5, 15, 52, 203]
    assert [len(list(associations(6, n, n))) for n in range(1, 7)] == [1, 31, 90, 65, 15, 1]
    every = {frozenset(groups) for groups in associations(5)}
    assert len(every) == 52
    assert all(sorted(m for g in groups for m in g) == list(range(5)) for groups in every)
    assert len(next(associations(30, 1, 1))[0]) == 30


@given(deployments(most=6, stages=1))
def test_the_fewest_batches_are_what_the_memory_allows(deployment: Deployment) -> None:
    tables = Tables(deployment)
    fitting = [len(groups) for groups in associations(tables.users) if tables.all_fit(groups)]
    assert fewest_batches(tables) == min(fitting, default=tables.users + 1)
    for batches in set(fitting):
        close = packed(tables, batches)
        assert close is not None
        assert len(close) == batches
        assert tables.all_fit(close)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("users", range(1, 6))
@pytest.mark.parametrize("kind", KINDS)
def test_ours_is_the_optimum(kind: str, users: int) -> None:
    random = Random(f"{kind} {users}")
    for _ in range(25 if users < 5 else 5):
        tables = Tables(instance(random, users, kind))
        best = optimum(tables)
        ours = plan_best(tables)
        assert ours is not None
        assert violation(ours.plan, tables.deployment) == ""
        assert evaluate(ours.plan, tables).throughput == pytest.approx(best, rel=1e-9)
        assert ours.bound == pytest.approx(best, rel=1e-9)
        # Algorithm 1 never beats the best of its own kind, and stays near it.
        theirs = algorithm1(tables)
        assert theirs is not None
        reached = evaluate(theirs.plan, tables).throughput / optimum(tables, 2)
        assert 0.8 < reached <= 1 + 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_the_search_comes_near_the_optimum_and_never_beats_it(kind: str) -> None:
    random = Random(kind)
    for users in (4, 5):
        for _ in range(2):
            tables = Tables(instance(random, users, kind))
            found, best = plan_best(tables, few=0), plan_best(tables)
            assert found is not None
            assert best is not None
            rate = evaluate(found.plan, tables).throughput
            assert 0.97 * best.bound <= rate <= best.bound * (1 + 1e-9)
            assert found.bound >= best.bound * (1 - 1e-9)


@given(deployments(most=3, stages=1, longest=4))
@settings(max_examples=40)
def test_brute_force_is_that_of_every_length_too(deployment: Deployment) -> None:
    tables = Tables(deployment)
    rates = [
        by_enumeration(tables, groups)
        for groups in associations(tables.users)
        if tables.all_fit(groups)
    ]
    ours = plan_best(tables)
    assert (ours is None) == (not rates)
    if ours is not None:
        assert evaluate(ours.plan, tables).throughput == pytest.approx(1000 * max(rates))


@given(deployments(most=4, longest=4))
@settings(max_examples=60)
def test_on_several_stages_no_plan_in_any_order_passes_the_bound(deployment: Deployment) -> None:
    tables = Tables(deployment)
    ours = plan_best(tables)
    if ours is None:
        return
    ours_rate = evaluate(ours.plan, tables).throughput
    assert ours_rate <= ours.bound * (1 + 1e-9)
    for groups in associations(tables.users):
        found = best_lengths(tables, groups)
        if found is not None:
            head, *rest = groups
            for order in permutations(rest):
                plan = replace(found.plan, batches=(head, *order))
                rate = evaluate(plan, tables).throughput
                assert rate <= ours.bound * (1 + 1e-9)


@given(deployments(most=4, longest=5))
@settings(max_examples=80)
def test_the_bound_holds_and_falls(deployment: Deployment) -> None:
    tables = Tables(deployment)
    bound = Bound(tables)
    bounds = [bound.above(n) for n in range(1, tables.users + 1)]
    assert bounds == sorted(bounds, reverse=True)
    for groups in associations(tables.users):
        found = best_lengths(tables, groups)
        if found is not None:
            assert found.ratio <= bounds[len(groups) - 1] * (1 + 1e-9)
            enough = found.ratio
            assert bound.above(len(groups), enough) >= enough


@given(st.booleans().flatmap(lambda fast: deployments(most=5, fast=fast)), st.data())
@settings(max_examples=120)
def test_the_association_step_is_the_best_of_all(
    deployment: Deployment, data: st.DataObject
) -> None:
    tables = Tables(deployment)
    length = st.integers(1, tables.longest)
    lengths = data.draw(st.lists(length, min_size=tables.users, max_size=tables.users))
    batches = data.draw(st.integers(1, tables.users))
    costs = [
        cost(tables, lengths, groups)
        for groups in associations(tables.users, batches, batches)
        if tables.all_fit(groups)
    ]
    # The depth-first search finds it by itself too, in any order of the users.
    by_itself = depth_first(tables, lengths, batches, range(tables.users), NODES)
    for found in (associate(tables, lengths, batches), by_itself):
        if found is None:
            assert not costs
            return
        assert len(found[1]) == batches
        assert found[0] == cost(tables, lengths, found[1])
        assert found[0][0] == pytest.approx(min(costs)[0])


@given(deployments(most=4, stages=1), st.integers(0, 3), st.data())
@settings(max_examples=60)
def test_a_better_user_never_lowers_the_throughput(
    deployment: Deployment, which: int, data: st.DataObject
) -> None:
    """Faster devices, better guesses, quicker links, a faster verifier, longer drafts."""
    users = list(deployment.users)
    m = which % len(users)
    better = data.draw(
        st.sampled_from(
            [
                replace(users[m], token_ms=users[m].token_ms * 0.7),
                replace(users[m], alpha=min(0.99, users[m].alpha * 1.2)),
                replace(users[m], link_ms=0.0),
            ]
        )
    )
    more = replace(deployment, users=(*users[:m], better, *users[m + 1 :]))
    server = deployment.verifier.stages[0]
    faster = replace(
        deployment,
        verifier=replace(deployment.verifier, stages=(replace(server, fixed_ms=1.0),)),
    )
    longer = replace(deployment, longest=deployment.longest + 1)
    rates = [_rate(one) for one in (deployment, more, faster, longer)]
    assert all(rate >= rates[0] * (1 - 1e-9) for rate in rates)


def _rate(deployment: Deployment) -> float:
    tables = Tables(deployment)
    found = plan_best(tables)
    return 0.0 if found is None else evaluate(found.plan, tables).throughput


def test_a_crowd_is_planned_within_its_bound() -> None:
    tables = Tables(instance(Random(3), 12, "paper"))
    found = plan_best(tables)
    assert found is not None
    assert violation(found.plan, tables.deployment) == ""
    rate = evaluate(found.plan, tables).throughput
    assert 0.85 * found.bound < rate <= found.bound * (1 + 1e-9)
    theirs = algorithm1(tables)
    assert theirs is not None
    assert rate >= evaluate(theirs.plan, tables).throughput * (1 - 1e-9)
    # A function of its arguments.
    assert plan_best(tables) == found
