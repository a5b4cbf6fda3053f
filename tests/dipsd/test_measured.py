"""What is measured while it runs, and what is made of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.dipsd.accepted import Acceptance
from asyncspec.dipsd.decide import MARGIN, bounded, decide, measured
from asyncspec.dipsd.evaluate import evaluate
from asyncspec.dipsd.greedy import simulate_greedy
from asyncspec.dipsd.measured import Affine, Measured
from asyncspec.dipsd.model import User
from asyncspec.dipsd.noise import Noise
from asyncspec.dipsd.plan import plan_of
from asyncspec.dipsd.tables import Tables
from asyncspec.pass_cost import affine
from asyncspec.rng import uniform

rounds = st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=60)


@given(rounds)
def test_acceptance_is_a_cautious_share(drawn: list[tuple[int, int]]) -> None:
    known = Acceptance()
    for length, right in drawn:
        known = known.with_round(length, min(length, right))
        assert all(0 <= rate <= 1 for rate in known.rates)
        tried, accepted = sum(known.tried), sum(known.accepted)
        chance = known.chance()
        assert 0 <= chance.low <= chance.mean <= chance.high <= 1
        assert chance.mean == pytest.approx(accepted / tried)
        # The k-th token is only judged where those before it were accepted.
        assert all(b <= a + 1e-9 for a, b in zip(known.accepted, known.tried[1:], strict=False))


@given(st.floats(0.1, 0.95), st.integers(2, 8), st.integers(0, 99))
def test_it_comes_close_and_follows_what_drifts(alpha: float, length: int, seed: int) -> None:
    known = Acceptance()
    for start, chance in ((0, alpha), (2000, 1 - alpha)):
        for number in range(start, start + 1500):
            right = 0
            while right < length and uniform(seed, number, right) < chance:
                right += 1
            known = known.with_round(length, right)
        assert known.chance().low == pytest.approx(chance, abs=0.12)


@given(st.floats(0, 1), st.floats(0.001, 1), st.lists(st.integers(1, 20), min_size=2, max_size=30))
def test_a_line_is_found(fixed: float, slope: float, lengths: list[int]) -> None:
    line = Affine()
    for length in lengths:
        line = line.with_point(length, fixed + slope * length)
    found = line.fit
    assert min(found) >= 0
    for length in lengths:
        assert found[0] + found[1] * length == pytest.approx(fixed + slope * length, rel=1e-4)


def test_times_are_known_when_both_were_seen() -> None:
    known = Measured()
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
    fixed, slope = affine(rows, seconds, most)
    assert fixed >= 0
    assert slope >= 0


# What liars say is bounded before it is planned with.
anything = st.one_of(st.floats(0, 300), st.floats(0, 1e308)).map(bounded)
users = st.builds(
    User, st.just("u"), st.floats(0, 1), st.just(0), token_ms=anything, link_ms=anything
)
stages = st.tuples(anything, st.floats(0, 30))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(users, min_size=1, max_size=8),
    st.lists(stages, min_size=1, max_size=3),
    st.sampled_from((0.0, 0.2, 1e300)),
)
def test_whatever_is_said_there_is_a_decision_and_plans_pay(
    people: list[User], passes: list[tuple[float, float]], jitter: float
) -> None:
    deployment = measured(people, passes)
    noise = Noise(jitter)
    decision = decide(deployment, noise)
    assert len(decision.lengths) == len(people)
    assert all(1 <= length <= deployment.longest for length in decision.lengths)
    assert decision == decide(deployment, noise)
    if decision.groups:
        forecast = evaluate(plan_of(decision.groups, decision.lengths), deployment)
        if not jitter:
            assert forecast.throughput == pytest.approx(decision.planned)
            assert forecast.period_ms == pytest.approx(decision.period_ms)
        assert decision.planned > decision.greedy * (1 + MARGIN)
    else:
        assert decision.lengths == decision.greedy_lengths
        assert decision.planned <= decision.greedy * (1 + MARGIN)
    noise = Noise(sigma=min(1.0, jitter), expected=True)
    rounds = max(4, 600 // len(people))
    run = simulate_greedy(Tables(deployment), decision.greedy_lengths, rounds, noise)
    assert run.throughput == pytest.approx(decision.greedy)
    assert run.by_user == pytest.approx(decision.greedy_by_user)
    assert sum(run.by_user) == pytest.approx(run.throughput)


@given(st.floats(0.01, 9), st.floats(0, 0.5), st.integers(1, 20))
def test_jitter_is_the_relative_deviation(token: float, share: float, length: int) -> None:
    known = Measured().with_draft(length, token * length)
    for number in range(300):
        off = share if number % 2 else -share
        known = known.with_draft(length, token * length * (1 + off))
    assert known.drafts_off.relative == pytest.approx(share, rel=0.2, abs=1e-6)


@given(st.integers(1, 9), st.integers(1, 9), st.floats(0, 5), st.floats(0, 90))
def test_work_is_rows(size: int, length: int, row: float, fixed: float) -> None:
    people = [User("u", 0.5, 0, 1.0)] * size
    model = Tables(measured(people, [(fixed, row), (fixed, 2 * row)]))
    work = model.work(range(size))[length]
    rows = size * (length + 1)
    first = max(fixed, 1e-3)
    assert model.passing(work) == pytest.approx(2 * first + 3 * row * rows)
