"""Rows follow what lines bring: what a stage tells of its line, what a draft node makes of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.cost_model.pipeline import PipelineCosts
from asyncspec.core.machine import Effect, LinkUp, Received
from asyncspec_nodes.roles.verify.config import VerifyConfig
from asyncspec_nodes.roles.verify.machine import VerifyMachine
from asyncspec_protocol.ids import DRAFT, Rank
from asyncspec_protocol.messages import PassTimes, Segment
from nodes.machine_driver import Driven, done, segment, sent, stage
from nodes.test_draft import TREE, V1, answer_source, guessed, started, verdict

seconds = st.floats(1e-6, 1.0)
line = st.just(0.0) | st.floats(1e-7, 0.1)
tables = st.lists(st.tuples(seconds, line), min_size=1, max_size=8).map(
    lambda drawn: {
        Rank(rank): PassTimes(Rank(rank), (1.0, 9.0), (taken, 2 * taken), row)
        for rank, (taken, row) in enumerate(drawn, 1)
    }
)


def most_rows(times: dict[Rank, PassTimes], back: float, way: float) -> int:
    return PipelineCosts(times, back).with_round_trip(0, way).max_rows


def lone_rows(times: dict[Rank, PassTimes], way: float) -> int:
    return PipelineCosts(times).with_round_trip(0, way).max_lone_rows


@given(tables, line, st.just(0.0) | seconds)
def test_rows_are_bounded_by_the_slowest_link(
    times: dict[Rank, PassTimes], back: float, way: float
) -> None:
    rows = most_rows(times, back, way)
    lines = [back, *(reported.row_seconds for reported in times.values())]
    assert 1 <= rows <= PARAMETERS.max_rows
    if rows > 1:
        slowest_pass = max(reported.seconds[0] for reported in times.values())
        assert rows * max(lines) <= PARAMETERS.link_utilization * slowest_pass * (1 + 1e-9)
        assert not way or rows * sum(lines) <= PARAMETERS.transfer_share * way * (1 + 1e-9)


@given(tables, line, seconds, st.floats(1, 100))
def test_rows_grow_with_bandwidth_and_latency(
    times: dict[Rank, PassTimes], back: float, way: float, factor: float
) -> None:
    rows = most_rows(times, back, way)
    faster = {k: replace(t, row_seconds=t.row_seconds / factor) for k, t in times.items()}
    assert most_rows(faster, back / factor, way) >= rows
    assert most_rows(times, back, way * factor) >= rows
    unbound = {k: replace(t, row_seconds=0.0) for k, t in times.items()}
    assert most_rows(unbound, 0.0, way) == PARAMETERS.max_rows


@given(tables, line, st.lists(st.tuples(st.integers(1, 64), seconds), min_size=1, max_size=20))
def test_round_trips_exclude_the_cost_of_rows(
    times: dict[Rank, PassTimes], back: float, probes: list[tuple[int, float]]
) -> None:
    costs = PipelineCosts(times, back)
    a_row = back + sum(reported.row_seconds for reported in times.values())
    for rows, way in probes:
        costs = costs.with_round_trip(rows, way + rows * a_row)
    ways = [way for _, way in probes]
    assert min(ways) * 0.999 - 1e-9 <= costs.round_trip <= max(ways) * 1.001 + 1e-9
    assert costs.max_rows == most_rows(times, back, costs.round_trip)


@given(tables, line, seconds, st.lists(st.integers(1, 64), min_size=1, max_size=8))
def test_overhead_is_what_is_neither_at_stages_nor_transfers_of_rows(
    times: dict[Rank, PassTimes], back: float, own: float, probes: list[int]
) -> None:
    """It bounds no rows, as it says nothing of the uncongested path."""
    known = costs = PipelineCosts(times, back)
    for rows in probes:
        costs = costs.with_overhead(rows, own + rows * sum(known.link_row_seconds))
    assert costs.overhead == pytest.approx(own, rel=1e-6, abs=1e-9)
    assert (costs.max_rows, costs.round_trip) == (known.max_rows, known.round_trip)


@given(seconds, seconds)
def test_a_shorter_overhead_counts_at_once(own: float, wait: float) -> None:
    """What waits on a link for others is longer."""
    known = PipelineCosts().with_overhead(1, own)
    longer = known.with_overhead(1, own + wait)
    assert longer.overhead is not None
    assert own < longer.overhead < own + wait / 2
    assert longer.with_overhead(1, own).overhead == own


@given(tables, st.just(0.0) | seconds, st.floats(1, 100))
def test_a_lone_session_sends_rows_that_add_little_latency(
    times: dict[Rank, PassTimes], way: float, factor: float
) -> None:
    rows, at = lone_rows(times, way), PipelineCosts(times).slowest
    assert at is not None
    bound = at(1) + PARAMETERS.lone_session_delay * max(at(1), way / len(times))
    assert rows == 1 or at(rows) <= bound
    assert rows == PARAMETERS.max_rows or at(rows + 1) > bound
    assert lone_rows(times, way * factor) >= rows
    assert lone_rows({}, way) == PARAMETERS.max_rows


def test_a_link_can_be_the_slowest_stage() -> None:
    times = {
        Rank(1): PassTimes(Rank(1), (1.0,), (0.5,)),
        Rank(2): PassTimes(Rank(2), (1.0,), (0.25,), 0.125),
    }
    at = PipelineCosts(times).slowest
    assert at is not None
    assert [at(rows) for rows in (1, 4, 8)] == [0.5, 0.5, 1.0]


# --- a stage ------------------------------------------------------------------------------------


def second() -> Driven:
    """The last of two stages, which has told what its passes take."""
    last = stage(rank=2, stages=2)
    assert [reported.row_seconds for reported in times_of(serve(last, 16, 0.0))] == [0.0]
    return last


def serve(last: Driven, count: int, took: float) -> list[Effect]:
    """So many segments of one row, whose line takes ``took`` seconds for each, and their passes."""
    effects: list[Effect] = []
    for _ in range(count):
        number = last.state.inbound[Rank(1)].received
        one = segment(number, {number: number - 1}, tokens=False)
        last.feed(Received(Rank(1), one, "hidden", took))
        effects += last.feed(done(last.state.running.job, (5,)))
    return effects


def times_of(effects: list[Effect]) -> list[PassTimes]:
    return sent(effects, PassTimes, DRAFT)


def test_a_stage_reports_the_seconds_of_a_row_on_its_link() -> None:
    last = second()
    (reported,) = times_of(serve(last, 5, 0.25))
    assert reported == PassTimes(Rank(2), (1.0,), (0.5,), 0.25)
    # What is about the same is no news, nor is it that somebody has measured nothing.
    assert times_of(serve(last, 5, 0.26) + serve(last, 5, 0.0)) == []
    assert [reported.row_seconds for reported in times_of(serve(last, 5, 0.125))] == [0.125]


def test_a_link_with_negligible_cost_is_not_reported() -> None:
    last = second()
    for took in (1e-6, 3e-5, 2e-3, 1e-7):
        assert times_of(serve(last, 3, took)) == []


def test_a_slow_link_is_reported_at_once() -> None:
    last = stage(rank=2, stages=2)
    (reported,) = times_of(serve(last, 1, 0.25))
    assert reported == PassTimes(Rank(2), (1.0,), (0.5,), 0.25)


def test_a_new_draft_node_receives_the_link_cost() -> None:
    last = second()
    serve(last, 3, 0.25)
    other = Rank(1001)
    reported = sent(last.feed(LinkUp(other)), PassTimes, other)
    assert [one.row_seconds for one in reported] == [0.25]
    assert times_of(serve(last, 1, 0.25)) == []


def test_the_first_draft_node_receives_calibrated_times() -> None:
    config = VerifyConfig(Rank(1), 1, tried_rows=(1, 16), tried_microseconds=(250000, 750000))
    reported = sent(Driven(VerifyMachine(config)).feed(LinkUp(DRAFT)), PassTimes, DRAFT)
    assert reported == [PassTimes(Rank(1), (1.0, 16.0), (0.25, 0.75), chunk_rows=16)]
    untried = Driven(VerifyMachine(VerifyConfig(Rank(1), 1)))
    assert sent(untried.feed(LinkUp(DRAFT)), PassTimes, DRAFT) == []


# --- a draft node -------------------------------------------------------------------------------


def rows_of_a_round(row_seconds: float) -> list[int]:
    """Of the segments that a session sends of its first tree, when the only stage has told what its
    line takes for a row; its passes take a second."""
    driven = started()
    driven.feed(Received(V1, PassTimes(V1, (1.0,), (1.0,), row_seconds)))
    effects = answer_source(driven, driven.effects, **TREE)  # type: ignore[attr-defined]
    return [len(message.ids) for message in sent(effects, Segment)]


def test_a_slow_link_bounds_the_rows_of_segments_and_a_fast_one_does_not() -> None:
    assert rows_of_a_round(0.0) == rows_of_a_round(0.01) == [3, 2, 1]
    # The first was bounded before the line was known; its root is not counted.
    assert rows_of_a_round(0.6) == [3, 1, 1, 1]


def test_the_first_segment_of_a_round_samples_the_round_trip() -> None:
    driven = started()
    first, second, _ = sent(answer_source(driven, driven.effects, **TREE), Segment)  # type: ignore[attr-defined]
    at = driven.now
    driven.feed(Received(V1, PassTimes(V1, (1.0,), (9.0,), 0.25)))
    driven.feed(verdict(first.segment, {1: 10, 2: 13, 3: 99}, applied=1))
    # Three rows of .25 s are not the way's.
    way = driven.state.costs.round_trip
    assert way == driven.now - at - 0.75
    driven.feed(verdict(second.segment, {5: 77}, applied=2))
    assert driven.state.costs.round_trip == way


def test_a_probe_without_verdict_times_nothing() -> None:
    driven = started()
    _, second, _ = sent(answer_source(driven, driven.effects, **TREE), Segment)  # type: ignore[attr-defined]
    driven.feed(verdict(second.segment, {4: 77}, applied=1))
    assert driven.state.sessions[0].probe is None
    assert driven.state.costs.round_trip == 0


def test_segments_behind_a_prompt_are_no_round_trip_samples() -> None:
    """It is late by the prompt's pieces before it."""
    driven, effects = guessed()
    _, _, first, *_ = sent(effects, Segment)
    driven.feed(verdict(1, {64: 10}), verdict(first.segment, {65: 12}))
    assert driven.state.costs.round_trip == 0


def test_without_speculation_a_token_takes_the_round_trip_of_a_row() -> None:
    """As it was measured, with what others take of the processors: not what passes take alone."""
    busy = PassTimes(Rank(1), (1, 9), (0.010, 0.018), contention=2.0)
    costs = PipelineCosts().with_times(busy).with_overhead(1, 0.0)
    assert costs.plain_seconds == pytest.approx(0.005)
    for seconds in (0.030, 0.040):
        costs = costs.with_round_trip(9, seconds)
    assert costs.plain_seconds == pytest.approx(0.022 + 0.010 / 16)
