"""What a line is said to bring, and for which lines rows are packed."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.cost_model import (
    ALWAYS,
    FEWEST,
    LARGE_BYTES,
    NEVER,
    PACKING,
    REMEMBERED,
    SAVED,
    Gauge,
    packs,
)

paces = st.floats(1e-9, 1e-5)
"""Seconds a byte: from 8 Gbit/s to .8 Mbit/s."""

sizes = st.integers(1, 400).map(lambda rows: rows * 6_000)
pauses = st.lists(st.floats(0, 0.5), min_size=1, max_size=60)
"""Of a node between two looks, in times of a frame: it looks late as often as it likes."""


def receive(gauge: Gauge, size: int, pace: float, waits: list[float], begun: float = 0.0) -> None:
    """A frame that a line brings at an even pace, as a link tells the gauge of it."""
    took = 0
    for part in accumulate(waits):
        now = begun + part * size * pace
        come = min(size, int((now - begun) / pace))
        if come == took:
            continue  # nobody looks where nothing has come
        took = come
        if took == size:
            break
        gauge.look(size - took, now)
    gauge.complete()


@given(sizes, paces, pauses)
def test_however_late_a_node_looks_the_line_is_as_fast_as_it_is(
    size: int, pace: float, waits: list[float]
) -> None:
    gauge = Gauge()
    for _ in range(FEWEST):
        receive(gauge, size, pace, [*waits, 1.0])
    if gauge.byte_seconds:
        assert gauge.byte_seconds == pytest.approx(pace, rel=2 / LARGE_BYTES)


@given(paces)
def test_who_looks_often_learns_the_pace_of_a_few_large_frames(pace: float) -> None:
    gauge = Gauge()
    for _ in range(FEWEST):
        assert gauge.byte_seconds == 0
        receive(gauge, 8 * LARGE_BYTES, pace, [0.1] * 11)
    assert gauge.byte_seconds == pytest.approx(pace, rel=2 / LARGE_BYTES)


@given(sizes, st.floats(0, 1))
def test_what_the_kernel_has_kept_says_nothing(size: int, now: float) -> None:
    gauge = Gauge()
    for _ in range(FEWEST):
        gauge.complete()
        gauge.look(size // 2, now)
        gauge.complete()
    assert gauge.byte_seconds == 0


@given(st.integers(1, LARGE_BYTES - 1), paces)
def test_small_frames_say_nothing(size: int, pace: float) -> None:
    gauge = Gauge()
    for _ in range(FEWEST):
        receive(gauge, size, pace, [0.1] * 11)
    assert gauge.byte_seconds == 0


@given(paces, st.lists(st.booleans(), min_size=REMEMBERED, max_size=3 * REMEMBERED))
def test_fewer_than_half_that_are_out_of_line_change_nothing(pace: float, late: list[bool]) -> None:
    """A sender that pauses amid a frame, a burst that a rested line lets through."""
    gauge, size = Gauge(), 8 * LARGE_BYTES
    for i, out in enumerate(late):
        most = sum(late[max(0, i - REMEMBERED + 1) : i + 1]) <= min(i, REMEMBERED - 1) // 2
        receive(gauge, size, pace * (50 if out else 1), [0.1] * 11, begun=float(i))
        if most and i + 1 >= FEWEST:
            assert gauge.byte_seconds == pytest.approx(pace, rel=2 / LARGE_BYTES)


@given(paces, st.floats(1.5, 100))
def test_a_line_that_has_changed_is_known_after_as_many_frames_as_are_remembered(
    pace: float, slower: float
) -> None:
    gauge, size = Gauge(), 8 * LARGE_BYTES
    for _ in range(REMEMBERED):
        receive(gauge, size, pace, [0.1] * 11)
    for i in range(REMEMBERED):
        receive(gauge, size, pace * slower, [0.1] * 11, begun=float(i))
    assert gauge.byte_seconds == pytest.approx(pace * slower, rel=2 / LARGE_BYTES)


@given(paces, paces, st.floats(1e-10, 1e-6))
def test_rows_are_packed_where_a_line_saves_more_than_that_costs(
    one: float, other: float, cost: float
) -> None:
    slow, fast = max(one, other), min(one, other)
    for before in (False, True):
        assert packs(before, slow, cost) >= packs(before, fast, cost)
        if packs(before, slow, cost):
            assert SAVED * slow >= cost
        if SAVED * slow >= PACKING * cost:
            assert packs(before, slow, cost)


@given(st.lists(st.floats(1.0, PACKING * 0.999), min_size=1), paces, st.booleans())
def test_a_measure_that_trembles_does_not_flap(
    factors: list[float], pace: float, before: bool
) -> None:
    for cost in (SAVED * pace, SAVED * pace / 2, SAVED * pace * 2):
        found = [before := packs(before, pace * factor, cost) for factor in factors]
        assert sum(a != b for a, b in pairwise(found)) <= 1


@given(st.booleans(), st.just(0.0) | paces)
def test_always_and_never_ask_no_line(before: bool, pace: float) -> None:
    assert packs(before, pace, ALWAYS)
    assert not packs(before, pace, NEVER)
    assert not packs(before, 0.0, 1e-12)
