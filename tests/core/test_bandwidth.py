"""What a line is said to bring, and for which lines rows are packed."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.cost_model.bandwidth import (
    ALWAYS_PACK,
    NEVER_PACK,
    BandwidthEstimator,
    should_pack,
)
from asyncspec.core.cost_model.parameters import PARAMETERS

paces = st.floats(1e-9, 1e-5)
"""Seconds a byte: from 8 Gbit/s to .8 Mbit/s."""

sizes = st.integers(1, 400).map(lambda rows: rows * 6_000)
pauses = st.lists(st.floats(0, 0.5), min_size=1, max_size=60)
"""Of a node between two looks, in times of a frame: it looks late as often as it likes."""


def receive(
    estimator: BandwidthEstimator, size: int, pace: float, waits: list[float], begun: float = 0.0
) -> None:
    """A frame that a line brings at an even pace, as a link tells the estimator of it."""
    took = 0
    for part in accumulate(waits):
        now = begun + part * size * pace
        come = min(size, int((now - begun) / pace))
        if come == took:
            continue  # nobody looks where nothing has come
        took = come
        if took == size:
            break
        estimator.on_read(size - took, now)
    estimator.on_frame_end()


@given(sizes, paces, pauses)
def test_late_reads_do_not_change_the_bandwidth(size: int, pace: float, waits: list[float]) -> None:
    estimator = BandwidthEstimator()
    for _ in range(PARAMETERS.min_bandwidth_frames):
        receive(estimator, size, pace, [*waits, 1.0])
    if estimator.byte_seconds:
        assert estimator.byte_seconds == pytest.approx(pace, rel=2 / PARAMETERS.min_frame_bytes)


@given(paces)
def test_frequent_samples_measure_few_large_frames(pace: float) -> None:
    estimator = BandwidthEstimator()
    for _ in range(PARAMETERS.min_bandwidth_frames):
        assert estimator.byte_seconds == 0
        receive(estimator, 8 * PARAMETERS.min_frame_bytes, pace, [0.1] * 11)
    assert estimator.byte_seconds == pytest.approx(pace, rel=2 / PARAMETERS.min_frame_bytes)


@given(sizes, st.floats(0, 1))
def test_bytes_buffered_by_the_kernel_are_no_bandwidth_sample(size: int, now: float) -> None:
    estimator = BandwidthEstimator()
    for _ in range(PARAMETERS.min_bandwidth_frames):
        estimator.on_frame_end()
        estimator.on_read(size // 2, now)
        estimator.on_frame_end()
    assert estimator.byte_seconds == 0


@given(st.integers(1, PARAMETERS.min_frame_bytes - 1), paces)
def test_small_frames_say_nothing(size: int, pace: float) -> None:
    estimator = BandwidthEstimator()
    for _ in range(PARAMETERS.min_bandwidth_frames):
        receive(estimator, size, pace, [0.1] * 11)
    assert estimator.byte_seconds == 0


@given(
    paces,
    st.lists(
        st.booleans(),
        min_size=PARAMETERS.bandwidth_frames,
        max_size=3 * PARAMETERS.bandwidth_frames,
    ),
)
def test_fewer_than_half_that_are_out_of_line_change_nothing(pace: float, late: list[bool]) -> None:
    """A sender that pauses amid a frame, a burst that a rested line lets through."""
    estimator, size = BandwidthEstimator(), 8 * PARAMETERS.min_frame_bytes
    for i, out in enumerate(late):
        most = (
            sum(late[max(0, i - PARAMETERS.bandwidth_frames + 1) : i + 1])
            <= min(i, PARAMETERS.bandwidth_frames - 1) // 2
        )
        receive(estimator, size, pace * (50 if out else 1), [0.1] * 11, begun=float(i))
        if most and i + 1 >= PARAMETERS.min_bandwidth_frames:
            assert estimator.byte_seconds == pytest.approx(pace, rel=2 / PARAMETERS.min_frame_bytes)


@given(paces, st.floats(1.5, 100))
def test_a_line_that_has_changed_is_known_after_as_many_frames_as_are_remembered(
    pace: float, slower: float
) -> None:
    estimator, size = BandwidthEstimator(), 8 * PARAMETERS.min_frame_bytes
    for _ in range(PARAMETERS.bandwidth_frames):
        receive(estimator, size, pace, [0.1] * 11)
    for i in range(PARAMETERS.bandwidth_frames):
        receive(estimator, size, pace * slower, [0.1] * 11, begun=float(i))
    assert estimator.byte_seconds == pytest.approx(
        pace * slower, rel=2 / PARAMETERS.min_frame_bytes
    )


@given(paces, paces, st.floats(1e-10, 1e-6))
def test_rows_are_packed_where_a_line_saves_more_than_that_costs(
    one: float, other: float, cost: float
) -> None:
    slow, fast = max(one, other), min(one, other)
    for before in (False, True):
        assert should_pack(before, slow, cost) >= should_pack(before, fast, cost)
        if should_pack(before, slow, cost):
            assert PARAMETERS.packing_saving * slow >= cost
        if PARAMETERS.packing_saving * slow >= PARAMETERS.packing_gain * cost:
            assert should_pack(before, slow, cost)


@given(st.lists(st.floats(1.0, PARAMETERS.packing_gain * 0.999), min_size=1), paces, st.booleans())
def test_a_measure_that_trembles_does_not_flap(
    factors: list[float], pace: float, before: bool
) -> None:
    for cost in (
        PARAMETERS.packing_saving * pace,
        PARAMETERS.packing_saving * pace / 2,
        PARAMETERS.packing_saving * pace * 2,
    ):
        found = [before := should_pack(before, pace * factor, cost) for factor in factors]
        assert sum(a != b for a, b in pairwise(found)) <= 1


@given(st.booleans(), st.just(0.0) | paces)
def test_always_and_never_ask_no_line(before: bool, pace: float) -> None:
    assert should_pack(before, pace, ALWAYS_PACK)
    assert not should_pack(before, pace, NEVER_PACK)
    assert not should_pack(before, 0.0, 1e-12)
