"""What is measured while it runs, and what is made of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core.cost_model.passes import AffineFit, fit_affine
from asyncspec.core.rng import uniform
from asyncspec.plugins.dipsd.evaluate import evaluate
from asyncspec.plugins.dipsd.model import Plan, Tables, User
from asyncspec.plugins.dipsd.online.decide import MARGIN, decide
from asyncspec.plugins.dipsd.online.request import clamp_ms, measured_deployment
from asyncspec.plugins.dipsd.simulation import Deviations, Noise, simulate_greedy
from asyncspec_nodes.roles.draft.measurements import (
    PRIOR_ROUNDS,
    AcceptanceCounts,
    DraftMeasurements,
)
from asyncspec_protocol.ids import SessionId
from effort import examples

rounds = st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=60)


@given(rounds)
def test_acceptance_is_a_cautious_share(drawn: list[tuple[int, int]]) -> None:
    known = AcceptanceCounts()
    for length, right in drawn:
        known = known.with_round(length, min(length, right))
        assert 0 <= known.accepted <= known.tried
        chance = known.chance()
        assert 0 <= chance.low <= chance.mean <= chance.high <= 1
        assert chance.mean == pytest.approx(known.accepted / known.tried)
        # Of every draft the first token is verified, each other one where the one before it was
        # accepted.
        assert known.rounds <= known.tried <= known.rounds + known.accepted + 1e-9


@given(st.floats(0.1, 0.95), st.integers(2, 8), st.integers(0, 99))
def test_it_comes_close_and_follows_what_drifts(alpha: float, length: int, seed: int) -> None:
    known = AcceptanceCounts()
    for start, chance in ((0, alpha), (2000, 1 - alpha)):
        for number in range(start, start + 1500):
            right = 0
            while right < length and uniform(seed, number, right) < chance:
                right += 1
            known = known.with_round(length, right)
        assert known.chance().low == pytest.approx(chance, abs=0.12)


evidence = st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=1, max_size=40)


def counted(drawn: list[tuple[int, int]]) -> AcceptanceCounts:
    known = AcceptanceCounts()
    for length, right in drawn:
        known = known.with_round(length, min(length, right))
    return known


@given(evidence, evidence)
def test_acceptance_of_other_users_shrinks_an_estimate_towards_theirs(
    own: list[tuple[int, int]], theirs: list[tuple[int, int]]
) -> None:
    user, others = counted(own), counted(theirs)
    alone, pulled, pool = user.chance(), user.chance(others), others.chance()
    low, high = sorted((alone.mean, pool.mean))
    assert low - 1e-9 <= pulled.mean <= high + 1e-9
    assert pulled.low <= pulled.mean <= pulled.high
    # It is worth some rounds, and no more.
    assert alone.rounds <= pulled.rounds <= alone.rounds + PRIOR_ROUNDS + 1e-9
    assert user.chance(AcceptanceCounts()) == alone


@given(evidence, st.integers(0, 99))
def test_a_users_own_rounds_win_in_the_end(theirs: list[tuple[int, int]], seed: int) -> None:
    user, others = AcceptanceCounts(), counted(theirs)
    for number in range(400):
        right = 0
        while right < 4 and uniform(seed, number, right) < 0.7:
            right += 1
        user = user.with_round(4, right)
    assert abs(user.chance(others).mean - user.chance().mean) < 0.08


@given(evidence, evidence, evidence)
def test_users_of_a_node_are_measured_apart_and_leave_what_they_showed(
    first: list[tuple[int, int]], second: list[tuple[int, int]], third: list[tuple[int, int]]
) -> None:
    node = DraftMeasurements()
    for user, drawn in ((1, first), (2, second)):
        for length, right in drawn:
            node = node.with_round(SessionId(user), length, min(length, right))
    # Nobody is their own prior.
    both = node.total
    assert node.chance(SessionId(1), both) == pytest.approx(counted(first).chance(counted(second)))
    new = node.chance(SessionId(3), both)
    assert new == pytest.approx(AcceptanceCounts().chance(both))
    left = node.without({SessionId(1)})
    assert set(left.users) == {2}
    assert left.total.tried == pytest.approx(both.tried)
    for length, right in third:
        left = left.with_round(SessionId(3), length, min(length, right))
    assert left.chance(SessionId(3), left.total).rounds >= len(third) * 0.9


@given(st.floats(0, 1), st.floats(0.001, 1), st.lists(st.integers(1, 20), min_size=2, max_size=30))
def test_a_line_is_found(fixed: float, slope: float, lengths: list[int]) -> None:
    line = AffineFit()
    for length in lengths:
        line = line.with_point(length, fixed + slope * length)
    found = line.fit
    assert min(found) >= 0
    for length in lengths:
        assert found[0] + found[1] * length == pytest.approx(fixed + slope * length, rel=1e-4)


def test_times_are_known_when_both_were_seen() -> None:
    known = DraftMeasurements()
    assert not known.with_draft(4, 0.1).timed
    assert known.with_draft(4, 0.1).with_link(-0.1).timed
    assert known.with_link(-0.1).links.fit == (0.0, 0.0)


tables = st.lists(
    st.tuples(st.floats(1, 300), st.floats(0, 9)), min_size=1, max_size=9, unique_by=lambda p: p[0]
)


@given(tables, st.floats(1, 300))
def test_the_line_of_a_table_is_nowhere_below_zero(
    points: list[tuple[float, float]], most: float
) -> None:
    rows, seconds = zip(*sorted(points), strict=True)
    fixed, slope = fit_affine(rows, seconds, most)
    assert fixed >= 0
    assert slope >= 0


# What a peer reports is bounded before it is planned with.
anything = st.one_of(st.floats(0, 300), st.floats(0, 1e308)).map(clamp_ms)
users = st.builds(
    User, st.just("u"), st.floats(0, 1), st.just(0), token_ms=anything, link_ms=anything
)
stages = st.tuples(anything, st.floats(0, 30))


@pytest.mark.slow
@settings(max_examples=examples(60, quick=12), deadline=None)
@given(
    st.lists(users, min_size=1, max_size=8),
    st.lists(stages, min_size=1, max_size=3),
    st.sampled_from((0.0, 0.2, 1e300)),
)
def test_any_measurements_give_a_decision(
    people: list[User], passes: list[tuple[float, float]], jitter: float
) -> None:
    deployment = measured_deployment(people, passes)
    noise = Noise(jitter)
    decision = decide(deployment, noise)
    assert len(decision.lengths) == len(people)
    assert all(1 <= length <= deployment.longest for length in decision.lengths)
    assert decision == decide(deployment, noise)
    if decision.groups:
        forecast = evaluate(Plan(decision.groups, decision.lengths), Tables(deployment))
        if not jitter:
            assert forecast.throughput == pytest.approx(decision.planned)
            assert forecast.period_ms == pytest.approx(decision.period_ms)
        assert decision.planned > decision.greedy * (1 + MARGIN)
    else:
        assert decision.lengths == decision.greedy_lengths
        assert decision.planned <= decision.greedy * (1 + MARGIN)
    noise = Noise(sigma=min(1.0, jitter), expected=True)
    rounds = max(4, min(100, 600 // len(people)))
    run = simulate_greedy(Tables(deployment), decision.greedy_lengths, rounds, noise)
    assert run.throughput == pytest.approx(decision.greedy)
    assert run.by_user == pytest.approx(decision.greedy_by_user)
    assert sum(run.by_user) == pytest.approx(run.throughput)


@given(st.floats(0.01, 9), st.floats(0, 0.5), st.integers(1, 20))
def test_jitter_is_the_relative_deviation(token: float, share: float, length: int) -> None:
    known = DraftMeasurements().with_draft(length, token * length)
    for number in range(300):
        off = share if number % 2 else -share
        known = known.with_draft(length, token * length * (1 + off))
    assert known.draft_deviation.relative == pytest.approx(share, rel=0.2, abs=1e-6)


@given(st.integers(1, 9), st.integers(1, 9), st.floats(0, 5), st.floats(0, 90))
def test_work_is_rows(size: int, length: int, row: float, fixed: float) -> None:
    people = [User("u", 0.5, 0, 1.0)] * size
    model = Tables(measured_deployment(people, [(fixed, row), (fixed, 2 * row)]))
    work = model.work(range(size))[length]
    rows = size * (length + 1)
    first = max(fixed, 1e-3)
    assert model.passing(work) == pytest.approx(2 * first + 3 * row * rows)


def test_jitter_counts_for_its_own_link() -> None:
    """One link that shakes costs the rotation; as much on everybody's alike costs more."""
    people = [User("u", 0.7, 0, 40.0, 60.0)] * 6
    deployment = measured_deployment(people, [(60.0, 3.0)])
    still, one, all_ = (
        Noise(deviations=Deviations((0.0,) * 6, links, (0.0,)))
        for links in ((0.0,) * 6, (0.8,) + (0.0,) * 5, (0.8,) * 6)
    )
    assert still.quiet
    assert not one.quiet
    forecasts = [decide(deployment, noise).planned for noise in (still, one, all_)]
    assert forecasts[0] > forecasts[1] > forecasts[2]


def test_forecasts_are_of_the_mean_and_lengths_are_cautious() -> None:
    people = [User("u", 0.6, 0, 20.0, 5.0)] * 4
    deployment = measured_deployment(people, [(60.0, 3.0)])
    cautious = decide(deployment)
    mean = decide(deployment, Noise(alphas=(0.75,) * 4))
    bolder = [replace(user, alpha=0.75) for user in people]
    bold = decide(measured_deployment(bolder, [(60.0, 3.0)]))
    assert cautious.greedy < mean.greedy <= bold.greedy * 1.01
    assert max(mean.lengths) <= max(bold.lengths)
