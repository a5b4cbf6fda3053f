"""The model of rounds, and the search for their shape."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.cost_model.pipeline import PipelineCosts
from asyncspec.policy.flow.acceptance import RANKS
from asyncspec.policy.flow.mean_tree import LEVELS, ROWS, MeanTree, RoundShape
from asyncspec.policy.flow.measured import Contention, LevelCost
from asyncspec.policy.flow.rounds import (
    PLAIN,
    STARTS,
    RoundCosts,
    best_shape,
    round_rate,
)
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import PassTimes
from flow_strategies import any_shapes, costs, profiles, shapes


@given(
    profiles,
    shapes.filter(lambda shape: shape.rows),
    st.lists(st.integers(1, 4), min_size=1, max_size=8),
)
def test_the_path_ends_at_one_node_of_the_mean_tree(
    profile: list[float], shape: RoundShape, later: list[int]
) -> None:
    segments, until = len(later), [i + more for i, more in enumerate(later)]
    tree = MeanTree(profile, shape, until)
    assert sum(tree.ends) == pytest.approx(1)
    assert all(-1e-9 <= end <= chance for end, chance in zip(tree.ends, tree.chances, strict=True))
    assert len(tree.rows) == segments
    assert sum(tree.rows) == len(tree.chances)
    assert all(rows <= shape.rows + (i == 0) for i, rows in enumerate(tree.rows))
    for level, segment in zip(tree.levels, tree.segments, strict=True):
        assert level <= shape.first + segment * shape.levels
        # Some parent a level up has no verdict yet.
        above = [s for at, s in zip(tree.levels, tree.segments, strict=True) if at == level - 1]
        assert not level or any(segment < until[one] for one in above)
    for level in set(tree.levels):
        on_it = [c for c, at in zip(tree.chances, tree.levels, strict=True) if at == level]
        assert sum(on_it) <= 1 + 1e-9


@given(profiles, costs, shapes)
def test_no_start_promises_more_than_the_shape_that_is_chosen(
    profile: list[float], cost: RoundCosts, near: RoundShape
) -> None:
    shape, rate = best_shape(profile, cost, (*STARTS, near))
    assert rate == round_rate(profile, shape, cost)
    for other in (PLAIN, *STARTS, near):
        assert rate.tokens_per_second >= round_rate(profile, other, cost).tokens_per_second


@given(profiles, costs)
@example([0.7, 0.1, 0.05], RoundCosts(lambda n: 0.8 + 0.2 * n, lambda n: 3.2 + 0.8 * n, 0.2))
def test_no_segment_has_fewer_rows_than_levels(profile: list[float], cost: RoundCosts) -> None:
    shape, _ = best_shape(profile, cost)
    assert shape.levels <= shape.rows


@given(profiles, costs, shapes.filter(lambda shape: shape.rows))
def test_levels_that_come_after_all_verdicts_add_no_token(
    profile: list[float], cost: RoundCosts, shape: RoundShape
) -> None:
    cost = cost._replace(level=1.001 * cost.whole(1 + shape.rows))
    chances = MeanTree(profile, shape, (1,)).chances
    most = sum(chances) / (shape.first * cost.level + cost.whole(1))
    assert round_rate(profile, shape, cost).tokens_per_second <= most * (1 + 1e-9)


@given(profiles, costs, shapes, st.integers(2, 16))
def test_sessions_share_what_the_slowest_part_brings(
    profile: list[float], cost: RoundCosts, shape: RoundShape, sessions: int
) -> None:
    """All of them send no more rows a second than it computes in the passes they share."""
    shared = round_rate(profile, shape, cost._replace(sessions=sessions))
    rows, lone = max(1, shape.rows), round_rate(profile, shape, cost).spacing
    spacing = lone if shape.rows else cost.whole(1)
    share = cost._replace(sessions=sessions).sessions_per_pass(rows, spacing)
    if shape.rows:
        every, joined = shared.spacing, cost.segments_per_pass(rows, share)
    else:
        every, joined = 1.0 / shared.tokens_per_second, 1
    assert every >= spacing * (1 - 1e-9)
    together = math.ceil(share * joined * rows)
    assert sessions * rows / every <= together / cost.slowest(together) * (1 + 1e-9)


@given(costs, st.integers(1, 16), st.sampled_from(ROWS[1:]), st.integers(1, 512), st.floats(0.1, 9))
def test_no_more_rows_are_expected_to_share_a_pass_than_may(
    cost: RoundCosts, sessions: int, rows: int, most: int, spacing: float
) -> None:
    """The others wait for a whole pass."""
    cost = cost._replace(sessions=sessions, most_rows=most)
    share = cost.sessions_per_pass(rows, spacing)
    assert share == 1 or share * rows <= most
    if (joined := cost.segments_per_pass(rows, share)) > 1:
        assert joined * math.ceil(share * rows) <= most
    passes = math.ceil(sessions / max(1, most // 2))
    rate = round_rate([1.0], RoundShape(1, 0, 1), cost)
    assert 2 / rate.tokens_per_second >= passes * cost.slowest(2) * (1 - 1e-9)


@given(profiles, costs, st.sampled_from(ROWS[2:]), st.floats(0.01, 1))
def test_levels_of_one_call_share_what_it_takes_beside_them(
    profile: list[float], cost: RoundCosts, rows: int, call: float
) -> None:
    slow = cost._replace(draft_call=call)
    for levels in (1, 3):
        assert slow.drafting(levels, rows) == pytest.approx(cost.drafting(levels, rows) + call)
    assert slow.drafting(2, rows, lone=1) == pytest.approx(
        cost.drafting(2, rows) + cost.drafting(1, 1) + call
    )
    assert slow.drafting(0, rows) == 0
    for shape in (RoundShape(0, 2, rows), RoundShape(3, 2, rows), RoundShape(3, 0, rows)):
        free = round_rate(profile, shape, cost).spacing
        assert round_rate(profile, shape, slow).spacing >= free - 1e-9


@given(profiles, costs, st.sampled_from(ROWS[2:]), st.floats(0.01, 1))
def test_rows_that_make_drafts_slow_make_rounds_slow(
    profile: list[float], cost: RoundCosts, rows: int, row: float
) -> None:
    slow, shape = cost._replace(draft_row=row), RoundShape(3, 2, rows)
    free = round_rate(profile, shape, cost._replace(level=cost.level + row * rows))
    rate = round_rate(profile, shape, slow)
    assert rate.spacing == pytest.approx(free.spacing)
    assert rate.spacing >= round_rate(profile, shape, cost).spacing


@given(profiles, costs, shapes, st.floats(0.5, 8))
def test_sharing_processors_slows_no_round_below_its_share(
    profile: list[float], cost: RoundCosts, shape: RoundShape, processors: float
) -> None:
    alone = round_rate(profile, shape, cost)
    shared = round_rate(profile, shape, cost._replace(contention=Contention(1.0, processors)))
    slower = alone.tokens_per_second / shared.tokens_per_second
    assert slower == pytest.approx(max(1.0, alone.busy / processors))
    if not shape.levels:
        assert alone.busy == pytest.approx(1)


@example([0.0], RoundShape(0, 1, 1), 7.0, 4.0)
@given(profiles, shapes, st.floats(0, 50), st.floats(1, 4))
def test_links_are_no_work_and_no_contention_makes_them_longer(
    profile: list[float], shape: RoundShape, links: float, longer: float
) -> None:
    """Passes that wait for a processor do not tell that links do."""
    times = {
        Rank(r): PassTimes(Rank(r), (1.0,), (longer,), 0.0, 0.0, contention=longer)
        for r in range(1, 5)
    }
    costs = RoundCosts.of(PipelineCosts(times=times, overhead=links), LevelCost(1.0, longer))
    assert costs.whole(1) == pytest.approx(4.0 + links)
    for contention in (Contention(longer), Contention(longer, 2.0)):
        slowed = costs._replace(contention=contention)
        plain = round_rate(profile, PLAIN, slowed)
        assert plain.tokens_per_second == pytest.approx(1.0 / (4.0 * longer + links))
        busy = round_rate(profile, shape, slowed).busy
        # Four stages and the draft node; where processors are too few more is under way.
        assert math.isfinite(contention.processors) or busy < 5.0 + 1e-6


def test_what_is_added_to_a_tree_of_many_siblings_is_a_part_of_a_level() -> None:
    """One row a segment, two likely siblings at each node: levels two deep have four nodes."""
    cost = RoundCosts(lambda rows: 1.0, lambda rows: 5.0, 0.7)
    narrow, wide = (round_rate([0.45, 0.38], RoundShape(0, 1, rows), cost) for rows in (1, 8))
    assert narrow.tokens_per_second < 0.8 * wide.tokens_per_second


@given(costs)
def test_a_draft_that_is_never_right_is_not_sent(cost: RoundCosts) -> None:
    assert best_shape([0.0] * RANKS, cost)[0].rows == 0


@given(costs, any_shapes, st.floats(0.1, 2.0), st.floats(0.0, 1.0))
@example(RoundCosts(lambda rows: 1.0, lambda rows: 4.0, 0.5), RoundShape(0, 0, 3), 0.5, 0.0)
def test_plain_decoding_is_always_among_what_is_compared(
    cost: RoundCosts, start: RoundShape, gain: float, top: float
) -> None:
    def gains(shape: RoundShape) -> float:
        return gain if shape.rows else 1.0

    shape, rate = best_shape([top], cost, (start,), gains)
    assert rate == round_rate([top], shape, cost)
    plain = round_rate([top], PLAIN, cost).tokens_per_second
    assert gains(shape) * rate.tokens_per_second >= plain


@given(costs, st.sampled_from(LEVELS[1:]))
def test_a_draft_that_is_always_right_runs_at_the_pace_of_the_slowest_part(
    cost: RoundCosts, levels: int
) -> None:
    """A chain in pieces: a piece a pass, or as fast as it is drafted, once the pipeline is full."""
    rate = round_rate([1.0], RoundShape(levels, levels, levels), cost)
    # Pieces that wait share a pass where rows are cheap.
    joined = cost.segments_per_pass(levels, 1) * levels
    spacing = max(cost.slowest(joined), joined * cost.level)
    assert rate.tokens_per_second <= joined / spacing + 1 / cost.whole(1)


def test_segments_are_longer_where_credit_is_long_on_its_way() -> None:
    """Places at the first stage come back after more than a pass, so that no two segments wait
    there to share one. Simulated (eight stages, links of a pass, a row .11): segments of four
    levels bring 1.19 and 1.08 times what those of one level bring, with two texts of 200 tokens."""
    seconds = {rows: 1 + 0.11 * (rows - 1) for rows in (1, 16)}
    times = {
        Rank(r): PassTimes(Rank(r), tuple(map(float, seconds)), tuple(seconds.values()), 0.0, 0.0)
        for r in range(1, 9)
    }
    near, far = (
        RoundCosts.of(PipelineCosts(times=times, overhead=9 * latency), LevelCost(1.0, 0.1))
        for latency in (0.45, 1.0)
    )
    assert far.credit == pytest.approx(2.0)
    one, four = RoundShape(1, 1, 1), RoundShape(4, 4, 4)
    assert near.segments_per_pass(1, 1.0) == 2
    assert far.segments_per_pass(1, 1.0) == 1
    profile = (0.9, 0.05, 0.01, 0.01)
    rates = [round_rate(profile, shape, far).tokens_per_second for shape in (one, four)]
    assert rates[0] < rates[1]


@given(st.floats(0, 0.98), st.floats(0, 0.98), any_shapes, costs)
def test_segments_wait_where_drafts_are_right(
    less: float, more: float, shape: RoundShape, cost: RoundCosts
) -> None:
    """A verdict seldom changes what comes behind it there."""
    less, more = sorted((less, more))
    few, many = (round_rate((chance,), shape, cost).segments for chance in (less, more))
    assert 2 <= few <= many
    if shape.rows and less < 0.5:
        # Those on their way, and those of a pass that waits.
        passes = 2 + math.ceil(cost.whole(1 + shape.rows) / cost.slowest(1))
        assert few <= PARAMETERS.waiting_segments * passes


@pytest.mark.parametrize("stages", [8, 64])
def test_a_long_pipeline_is_filled(stages: int) -> None:
    """Also with more segments than are laid out one by one."""
    costs = RoundCosts(lambda rows: 1.0, lambda rows: float(stages), 0.1)
    rate = round_rate((0.3, 0.1), RoundShape(0, 1, 4), costs)
    assert min(rate.segments, rate.depth) >= stages
