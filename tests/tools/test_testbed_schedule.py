"""When bytes come out of a wire: laws of the schedule, without any clock."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tools.testbed.schedule import BURST_SECONDS, PAYLOAD_SHARE, Schedule, Serial


def added_up(steps: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Pauses and sizes as times and sizes."""
    times = itertools.accumulate(pause for pause, _ in steps)
    return [(time, size) for time, (_, size) in zip(times, steps, strict=True)]


steps = st.tuples(st.floats(0, 0.05), st.integers(0, 65_536))
arrivals = st.lists(steps, min_size=1, max_size=60).map(added_up)
seconds = st.floats(0, 0.2)
rates = st.floats(0.5, 10_000)


@given(arrivals, seconds, seconds, st.integers(0, 2**31), st.lists(rates, max_size=3))
def test_nothing_is_early_nothing_overtakes_and_a_seed_is_a_schedule(
    pieces: list[tuple[float, int]], latency: float, jitter: float, seed: int, mbits: list[float]
) -> None:
    def times() -> list[float]:
        schedule = Schedule(latency, jitter, seed, [Serial(mbit) for mbit in mbits])
        return [schedule.release(now, size) for now, size in pieces]

    out = times()
    assert out == sorted(out)
    assert all(time >= now + latency for time, (now, _) in zip(out, pieces, strict=True))
    assert out == times()


@given(arrivals, seconds, seconds, st.integers(0, 2**31))
def test_jitter_is_bounded(
    pieces: list[tuple[float, int]], latency: float, jitter: float, seed: int
) -> None:
    schedule, last = Schedule(latency, jitter, seed), 0.0
    for now, size in pieces:
        out = schedule.release(now, size)
        assert out <= max(last, now + latency + jitter) + 1e-9
        last = out


@given(st.lists(st.floats(0, 0.99 * BURST_SECONDS), max_size=30), st.floats(0, 0.2), st.integers())
def test_a_burst_keeps_its_shape(gaps: list[float], jitter: float, seed: int) -> None:
    schedule, now = Schedule(0.01, jitter, seed), 0.0
    first = schedule.release(now, 1)
    for gap in gaps:
        now += gap
        assert abs(schedule.release(now, 1) - (first + now)) < 1e-9


@given(arrivals, seconds, rates)
def test_a_line_is_a_queue_with_one_server(
    pieces: list[tuple[float, int]], latency: float, mbit: float
) -> None:
    """Against the textbook's recursion (Lindley's), in bits and frames."""
    schedule = Schedule(latency, serials=[Serial(mbit)])
    done = 0.0
    for now, size in pieces:
        done = max(done, now) + size * 8 / (mbit * 1e6 * PAYLOAD_SHARE)
        assert abs(schedule.release(now, size) - (done + latency)) < 1e-9


@given(st.integers(1, 10**7), st.lists(rates, min_size=1, max_size=3))
def test_a_message_takes_the_time_of_the_slowest_line(size: int, mbits: list[float]) -> None:
    schedule = Schedule(0.0, serials=[Serial(mbit) for mbit in mbits])
    wanted = size * 8 / (min(mbits) * 1e6 * PAYLOAD_SHARE)
    assert abs(schedule.release(0.0, size) / wanted - 1) < 1e-9


def test_two_wires_share_the_line_they_both_lead_over() -> None:
    uplink = Serial(8 / PAYLOAD_SHARE)  # a megabyte of payload a second
    first, second = Schedule(0.0, serials=[uplink]), Schedule(0.5, serials=[uplink])
    assert abs(first.release(0.0, 10**6) - 1.0) < 1e-9
    assert abs(second.release(0.0, 10**6) - 2.5) < 1e-9


def test_jitter_spreads_over_its_range() -> None:
    schedule = Schedule(0.0, 1.0, seed=3)
    extras = [schedule.release(10.0 * n, 1) - 10.0 * n for n in range(400)]
    assert min(extras) < 0.05
    assert max(extras) > 0.95
    assert 0.4 < sum(extras) / len(extras) < 0.6
