"""In how many rows at a time prompts are read: soonest, and beside answers so that nobody waits."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.cost_model.passes import interpolate
from asyncspec.core.cost_model.pipeline import PipelineCosts
from asyncspec.core.cost_model.rows import chunk_rows_beside
from asyncspec.core.costs import StageCost
from asyncspec.core.machine import Emit, Received, Submitted
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import Credit, PassTimes, Segment
from cluster import ask
from nodes.machine_driver import draft, sent
from nodes.test_draft import verdict

SIZES = (1.0, 16.0, 64.0)
# A CPU's: 64 rows cost almost ten times one.
DEAR = (0.017, 0.045, 0.161)

seconds = st.floats(1e-5, 1.0)
line = st.just(0.0) | st.floats(1e-7, 0.01)
stages = st.lists(
    st.tuples(seconds, st.floats(0, 0.1), st.floats(0, 0.1), line), min_size=1, max_size=6
).map(
    lambda drawn: {
        Rank(rank): PassTimes(Rank(rank), SIZES, (one, one + 15 * few, one + 63 * many), row)
        for rank, (one, few, many, row) in enumerate(drawn, 1)
    }
)


def read(pieces: list[int], times: dict[Rank, PassTimes], back: float, decoding: int = 0) -> float:
    """When the last piece has come through all stages and lines, each of which takes one at a
    time, in order, with so many rows of answers beside it."""
    free = [0.0] * (2 * len(times) + 1)
    for piece in pieces:
        rows, at = piece + decoding, 0.0
        takes: list[float] = []
        for reported in times.values():
            takes += [
                reported.row_seconds * rows,
                interpolate(reported.rows, reported.seconds)(rows),
            ]
        for i, taken in enumerate([*takes, back * rows]):
            at = free[i] = max(at, free[i]) + taken
    return free[-1]


def cut(length: int, rows: int) -> list[int]:
    starts = [*range(0, length, rows), length]
    return [end - start for start, end in pairwise(starts)]


@given(st.integers(1, 400), st.integers(1, 80), stages, line, st.integers(0, 100))
def test_a_prompt_is_read_about_as_soon_as_can_be(
    length: int, most: int, times: dict[Rank, PassTimes], back: float, decoding: int
) -> None:
    rows = PipelineCosts(times, back).prefill_chunk_rows(length, most, decoding)
    assert min(most, PARAMETERS.min_chunk_rows) <= rows <= most
    soon = read(cut(length, rows), times, back, decoding)
    for other in range(min(most, PARAMETERS.min_chunk_rows), most + 1):
        if length % other == 0 or other >= length:
            other_way = read(cut(length, other), times, back, decoding)
            assert soon <= other_way / (1 - PARAMETERS.min_chunk_gain) * (1 + 1e-9)


@given(st.integers(1, 4000), st.integers(1, 80), stages, line, st.integers(64, 4096))
def test_longer_chunks_are_measured_and_pay(
    length: int, most: int, times: dict[Rank, PassTimes], back: float, timed: int
) -> None:
    usual = PipelineCosts(times, back).prefill_chunk_rows(length, most)
    longest = {rank: replace(one, chunk_rows=timed) for rank, one in times.items()}
    rows = PipelineCosts(longest, back).prefill_chunk_rows(length, most)
    if rows == usual:
        return
    assert most < rows <= timed
    assert PipelineCosts(longest).slowest(rows) <= PARAMETERS.max_chunk_seconds  # type: ignore[misc]
    soon, later = (read(cut(length, chunk), times, back) for chunk in (rows, usual))
    assert soon <= later * (1 - PARAMETERS.min_chunk_gain / 2)
    # One stage that has timed no such passes is enough.
    longest[Rank(1)] = times[Rank(1)]
    assert PipelineCosts(longest, back).prefill_chunk_rows(length, most) == usual


@given(st.integers(1, 400), st.integers(1, 80), seconds, st.integers(1, 8))
def test_where_rows_are_free_pieces_are_as_long_as_they_may_be(
    length: int, most: int, taken: float, count: int
) -> None:
    times = {Rank(r): PassTimes(Rank(r), (1.0, 64.0), (taken, taken)) for r in range(1, count + 1)}
    assert math.ceil(length / PipelineCosts(times).prefill_chunk_rows(length, most)) == math.ceil(
        length / most
    )
    assert PipelineCosts().prefill_chunk_rows(length, most) == most


@pytest.mark.parametrize(
    ("length", "stages", "sooner"), [(64, 4, 2.0), (64, 8, 2.6), (82, 4, 1.8), (200, 4, 1.3)]
)
def test_where_rows_are_dear_a_short_prompt_keeps_all_stages_at_work(
    length: int, stages: int, sooner: float
) -> None:
    times = {Rank(r): PassTimes(Rank(r), SIZES, DEAR) for r in range(1, stages + 1)}
    rows = PipelineCosts(times).prefill_chunk_rows(length, 64)
    assert read(cut(length, 64), times, 0.0) > sooner * read(cut(length, rows), times, 0.0)


def test_prompts_that_are_read_at_a_time_keep_stages_at_work_for_each_other() -> None:
    driven = draft(stages=4, credit=0)
    for rank in range(1, 5):
        driven.feed(Received(Rank(rank), PassTimes(Rank(rank), SIZES, DEAR)))
    for number in range(4):
        driven.feed(Submitted(ask(number, prompt=tuple(range(2 + number, 66 + number)))))
    sent(driven.feed(Received(Rank(1), Credit(9))), Segment)
    together = driven.state.costs.prefill_chunk_rows(4 * 64, 64)
    assert {one.chunk_rows for one in driven.state.sessions.values()} == {together}
    assert together > driven.state.costs.prefill_chunk_rows(64, 64)


def test_a_prompt_beside_one_answer_is_read_in_short_pieces_and_alone_at_once() -> None:
    driven = draft(stages=1)
    driven.feed(Received(Rank(1), PassTimes(Rank(1), SIZES, DEAR)))
    long = tuple(range(1, 65))
    alone = sent(driven.feed(Submitted(ask(0, prompt=long, policy="autoregressive"))), Segment)
    assert [len(piece.ids) for piece in alone] == [64]
    driven.feed(verdict(0, {63: 5}))
    beside = sent(driven.feed(Submitted(ask(1, prompt=long, policy="autoregressive"))), Segment)
    rows = chunk_rows_beside(64, 1, 1, interpolate(SIZES, DEAR))
    assert rows < 64
    assert [len(piece.ids) for piece in beside] == [rows] * (64 // rows)


def test_a_session_keeps_to_the_pieces_that_its_prompt_began_with() -> None:
    driven = draft(stages=4, credit=2)
    for rank in range(1, 5):
        driven.feed(Received(Rank(rank), PassTimes(Rank(rank), SIZES, DEAR)))
    pieces = sent(driven.feed(Submitted(ask(0, prompt=tuple(range(2, 66))))), Segment)
    (rows,) = {len(piece.ids) for piece in pieces}
    assert rows == driven.state.costs.prefill_chunk_rows(64, 64) < 20
    # A stage says that rows are free after all.
    driven.feed(Received(Rank(1), PassTimes(Rank(1), SIZES, (9.0, 9.0, 9.0))))
    pieces += sent(driven.feed(Received(Rank(1), Credit(9))), Segment)
    assert {len(piece.ids) for piece in pieces[:-1]} == {rows}
    assert sum(len(piece.ids) for piece in pieces) == 64


def test_who_asks_is_told_how_much_of_a_prompt_has_been_read() -> None:
    prompt = tuple(range(1, 200))
    reports: dict[bool, list[Emit]] = {}
    for progress in (False, True):
        driven = draft(stages=1, credit=1)
        request = ask(0, prompt=prompt, policy="autoregressive", progress=progress)
        effects = driven.feed(Submitted(request))
        for credit in range(2, 9):
            effects += driven.feed(Received(Rank(1), Credit(credit)))
        assert sum(len(piece.ids) for piece in sent(effects, Segment)) == len(prompt)
        reports[progress] = [effect for effect in effects if isinstance(effect, Emit)]
    assert not reports[False]
    assert [one.prompt_read for one in reports[True]] == [64, 128, 192]
    assert not any(one.tokens for one in reports[True])


@given(
    st.integers(1, 4096), st.integers(0, 128), st.integers(0, 8), st.integers(1, 64),
    st.floats(0.0, 0.2),
)  # fmt: skip
def test_prompts_delay_no_answer(
    most: int, decoding: int, prompts: int, plateau: int, row_seconds: float
) -> None:
    cost = StageCost(1.0, plateau, row_seconds)
    rows = chunk_rows_beside(most, decoding, prompts, cost.seconds)
    assert min(most, PARAMETERS.min_chunk_rows) <= rows <= most
    if decoding and prompts and rows > PARAMETERS.min_chunk_rows:
        assert cost.seconds(
            decoding + prompts * rows
        ) <= PARAMETERS.max_prefill_slowdown * cost.seconds(decoding)
    if not decoding or not prompts:
        assert rows == most
    assert chunk_rows_beside(most, decoding, prompts, None) == most
    assert (
        chunk_rows_beside(most, decoding, prompts, replace(cost, row_seconds=0.0).seconds) == most
    )
