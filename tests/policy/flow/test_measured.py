"""Measured speeds, draft levels and contention."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.cost_model.pipeline import PipelineCosts
from asyncspec.policy.base import Drafted
from asyncspec.policy.flow.measured import Contention, LevelCost, MeasuredSpeed
from asyncspec.policy.flow.policy import Flow


@given(st.floats(0.2, 1.5), st.integers(1, 8))
def test_measured_speeds_replace_expected_ones_until_they_are_old(
    share: float, tokens: int
) -> None:
    known = MeasuredSpeed()
    assert known.mean(10.0) == pytest.approx(10)
    for _ in range(0, 400, tokens):
        known = known.observe(tokens, tokens / (10 * share), 10.0)
    assert known.mean(10.0) == pytest.approx(10 * share, rel=0.2)
    assert known.doubt < 0.1 < 0.99 < known.decay(100_000).doubt
    assert known.decay(100_000).mean(10.0) == pytest.approx(10, rel=0.01)


@given(
    st.floats(0.1, 9),
    st.floats(0, 1),
    # Means of whole numbers of rows.
    st.lists(st.integers(10, 640).map(lambda n: n / 10), min_size=2, max_size=2, unique=True),
    st.floats(0, 9),
)
def test_draft_rows_cost_what_levels_of_several_numbers_take(
    level: float, row: float, rows: list[float], call: float
) -> None:
    """Known from what one shape sends: its first level has a row, later ones as many as leaves."""
    known = LevelCost()
    for _ in range(200):
        for number in rows:
            known = known.observe(level + row * number, number, call=call)
    assert known.at(32.0) == pytest.approx(level + 32.0 * row, rel=0.01)
    assert known.call == pytest.approx(call)


@given(st.lists(st.floats(1, 7), min_size=1, max_size=20), st.integers(1, 4))
def test_the_first_draft_calls_count_alike(seconds: list[float], sessions: int) -> None:
    known = LevelCost()
    for one in seconds:
        for _ in range(sessions):
            known = known.observe(one, 4.0, sessions, call=one)
    assert known.at(4.0) == pytest.approx(fmean(seconds))
    assert known.call == pytest.approx(fmean(seconds))


@given(st.floats(1, 7), st.lists(st.floats(1, 7), min_size=1, max_size=4))
def test_an_abandoned_draft_bounds_a_level_until_one_is_measured(
    most: float, later: list[float]
) -> None:
    flow, pipeline = Flow(), PipelineCosts()
    memory = flow.learn(None, Drafted(most, pipeline, abandoned=True))
    for seconds in later:
        memory = flow.learn(memory, Drafted(seconds, pipeline, abandoned=True))
    assert memory.level is not None
    assert memory.level.at(8.0) == most
    memory = flow.learn(memory, Drafted(1.0, pipeline, rows=4.0))
    assert memory.level == LevelCost(4.0, 1.0, calls=1.0)
    assert flow.learn(memory, Drafted(most, pipeline, abandoned=True)) == memory


@given(st.floats(1, 16), st.floats(1.5, 16), st.floats(1, 2))
def test_shared_processors_are_found_from_longer_passes(
    processors: float, busy: float, alone: float
) -> None:
    known, truth = Contention().observe(alone, 1.0, 8), Contention(alone, processors)
    for _ in range(100):  # a longer pass with one node at work counts little by little
        known = known.observe(alone, 1.0, 0)
    known = known.observe(truth.at(busy), busy, 8)
    assert known.at(1.0) == pytest.approx(alone, rel=0.01)
    assert known.at(busy) == pytest.approx(truth.at(busy), rel=0.11)
    assert known.observe(alone, 1.0, 100_000).at(busy) == pytest.approx(alone, rel=0.01)


@given(st.floats(1, 8), st.lists(st.floats(1, 16), min_size=1))
def test_a_slowdown_that_is_always_there_is_no_sharing(slower: float, busy: list[float]) -> None:
    """A quota of each device, or another program on it: fewer nodes at work make none faster."""
    known = Contention()
    for nodes in busy:
        known = known.observe(slower, nodes, 8)
        assert known.at(1.0) == known.at(16.0) == pytest.approx(slower)


@given(st.floats(1, 8), st.floats(1, 8), st.floats(1.5, 16))
def test_a_slowdown_that_stays_with_one_node_at_work_was_no_sharing(
    before: float, slower: float, busy: float
) -> None:
    """Another program begins while several nodes are at work."""
    known = Contention().observe(before, busy, 8).observe(before * slower, busy, 8)
    for _ in range(100):
        known = known.observe(before * slower, 1.0, 0)
    assert known.at(busy) == pytest.approx(before * slower, rel=0.01)
