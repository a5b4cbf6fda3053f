"""What passes are said to take, and how wide that makes a session."""

from __future__ import annotations

from itertools import pairwise
from math import inf, nextafter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.cost_model.passes import PassCost, interpolate
from asyncspec.core.cost_model.rows import best_tree_budget, rows_within
from asyncspec.core.costs import StageCost
from asyncspec.core.rng import uniform

rows = st.integers(1, 300)
passes = st.lists(st.tuples(rows, st.floats(0.001, 10.0)), min_size=1, max_size=80)
chances = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=40).map(
    lambda values: sorted(values, reverse=True)
)


def watched(measured: list[tuple[int, float]]) -> PassCost:
    cost = PassCost()
    for count, seconds in measured:
        cost = cost.observe(count, seconds)
        cost = cost.report() or cost
    return cost


@given(passes)
def test_a_table_lies_within_what_was_measured(measured: list[tuple[int, float]]) -> None:
    table, seconds = watched(measured * 8).table()
    assert list(table) == sorted(set(table))
    for count, took in zip(table, seconds, strict=True):
        assert min(r for r, _ in measured) <= count <= max(r for r, _ in measured)
        times = [s for _, s in measured]
        assert nextafter(min(times), -inf) * 0.999 <= took <= max(times) * 1.001


@given(passes)
def test_an_unchanged_cost_is_not_reported(measured: list[tuple[int, float]]) -> None:
    cost = PassCost()
    for count, seconds in measured:
        cost = cost.observe(count, seconds)
        reported = cost.report()
        if reported is not None:
            assert (reported.table(), reported.reported_jitter) != (
                cost.table(),
                cost.reported_jitter,
            )
            assert reported.report() is None
            cost = reported


tried = st.dictionaries(st.sampled_from([1, 4, 16, 64]), st.floats(0.001, 10.0), min_size=1)


@given(tried)
def test_calibrated_times_are_known_at_once(times: dict[int, float]) -> None:
    sizes = sorted(times)
    reported = PassCost.from_trial(sizes, [times[size] for size in sizes]).report()
    assert reported is not None
    assert reported.table() == (tuple(map(float, sizes)), tuple(times[size] for size in sizes))
    assert reported.report() is None
    assert PassCost.from_trial((), ()) == PassCost()


@given(tried, st.sampled_from([1, 4, 16, 64]), st.floats(0.001, 10.0))
def test_passes_soon_count_for_more_than_what_was_tried(
    times: dict[int, float], size: int, seconds: float
) -> None:
    cost = PassCost.from_trial(list(times), list(times.values()))
    for _ in range(8):
        cost = cost.observe(size, seconds)
        assert cost.deviation.relative == 0.0, "tries say nothing of how steady passes are"
    table = dict(zip(*cost.averages(), strict=True))
    first = times.get(size, seconds)
    assert abs(table[size] - seconds) <= abs(first - seconds) / 2 + 1e-9


@given(st.floats(0.001, 1.0), st.floats(0.0, 0.01), st.floats(0.0, 0.6), st.integers(0, 9))
def test_jitter_is_how_far_passes_are_from_others_as_large(
    fixed: float, row: float, share: float, seed: int
) -> None:
    cost = PassCost()
    for number in range(400):
        count = 1 + int(uniform(seed, number, 0) * 40)
        cost = cost.observe(count, fixed + row * count)
    # Passes of other sizes are no jitter.
    assert cost.deviation.relative < 0.12
    assert cost.unreported().report() is not None
    for number in range(600):
        cost = cost.observe(8, (fixed + 8 * row) * (1 + (share if number % 2 else -share)))
    assert cost.deviation.relative == pytest.approx(share, rel=0.2, abs=0.08)
    reported = cost.report() or cost
    assert abs(reported.reported_jitter - cost.deviation.relative) <= 0.05


@given(passes, rows, rows)
def test_more_rows_never_take_less(measured: list[tuple[int, float]], one: int, two: int) -> None:
    table = watched(measured * 8).table()
    at = interpolate(*table)
    assert at(min(one, two)) <= at(max(one, two)) * (1 + 1e-9)


@given(st.integers(1, 64), st.floats(0.001, 0.1))
def test_a_plateau_and_a_line_are_found(plateau: int, row_seconds: float) -> None:
    """Between sizes that were measured the fit is off by no more than the line rises there."""
    truth = StageCost(1.0, plateau, row_seconds)
    sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    at = interpolate(*watched([(n, truth.seconds(n)) for n in sizes] * 8).table())
    for count in sizes:
        assert abs(at(count) - truth.seconds(count)) < 1e-6
    for low, high in pairwise(sizes):
        for count in range(low, high):
            assert truth.seconds(count) - 1e-6 <= at(count) <= truth.seconds(high) + 1e-6


@given(st.floats(0.001, 1.0), st.floats(0.0, 0.1), st.integers(1, 40), st.integers(1, 40))
def test_the_cost_of_few_rows_follows_from_more_rows(
    fixed: float, row: float, few: int, more: int
) -> None:
    sizes = (few, few + more)
    at = interpolate(sizes, [fixed + row * rows for rows in sizes])
    for rows in range(1, sizes[1] + 10):
        assert at(rows) == pytest.approx(fixed + row * rows)


@given(passes, st.floats(0.0, 2.0), st.integers(1, 300))
def test_cheap_rows_are_the_most_that_cost_little(
    measured: list[tuple[int, float]], share: float, most: int
) -> None:
    at = interpolate(*watched(measured * 8).table())
    bound = (1 + share) * at(1)
    rows = rows_within(at, bound, most)
    assert 1 <= rows <= most
    assert at(rows) <= bound
    assert rows == most or at(rows + 1) > bound


@given(chances, st.integers(1, 32), st.integers(1, 64), st.floats(0.0, 0.5))
def test_the_chosen_row_budget_is_the_best(
    falling: list[float], sessions: int, plateau: int, row_seconds: float
) -> None:
    cost = StageCost(1.0, plateau, row_seconds)

    def rate(budget: int) -> float:
        return sessions * sum(falling[:budget]) / cost.seconds(sessions * budget)

    budget = best_tree_budget(falling, sessions, cost.seconds)
    assert 1 <= budget <= len(falling)
    assert all(rate(other) <= rate(budget) * (1 + 1e-9) for other in range(1, len(falling) + 1))


@given(chances, st.integers(1, 16))
def test_free_rows_are_all_worth_it(falling: list[float], sessions: int) -> None:
    budget = best_tree_budget(falling, sessions, lambda rows: 1.0)
    assert sum(falling[:budget]) == sum(falling)


@given(chances, st.integers(1, 15), st.floats(0.01, 0.5))
def test_more_sessions_make_narrower_trees(
    falling: list[float], sessions: int, row_seconds: float
) -> None:
    cost = StageCost(1.0, 16, row_seconds)
    more = best_tree_budget(falling, sessions + 1, cost.seconds)
    # On the plateau's very edge a row more may fit for fewer sessions: beyond it, never.
    if sessions * more > cost.plateau:
        assert more <= best_tree_budget(falling, sessions, cost.seconds)


@given(passes)
def test_what_other_work_takes_is_told_apart(measured: list[tuple[int, float]]) -> None:
    """Passes three times as long as alone: the times as they are, and how much longer."""
    alone, shared = watched(measured * 8), PassCost()
    for count, seconds in measured * 8:
        shared = shared.observe(count, 3 * seconds, 2 * seconds)
    assert shared.contention == pytest.approx(3, rel=0.2)
    table, longer = alone.averages(), shared.averages()
    assert longer[0] == table[0]
    assert longer[1] == pytest.approx([shared.contention * seconds for seconds in table[1]])
