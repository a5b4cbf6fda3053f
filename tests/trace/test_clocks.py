"""Clocks: the truth lies within what is stated."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from asyncspec.trace.records import NodeRecord, Probe
from asyncspec_nodes.plugins.viewer.analysis.log import (
    USUAL_DRIFT,
    WINDOW_SECONDS,
    ClockFit,
    estimate,
    fit,
)

delays = st.floats(1e-5, 0.05)


@given(
    offset=st.floats(-1e5, 1e5),
    drift=st.floats(-2e-4, 2e-4),
    start=st.floats(0, 1e4),
    trips=st.lists(st.tuples(delays, delays), min_size=1, max_size=40),
    pause=st.floats(0.02, 2.0),
    fast=st.floats(2e-5, 1e-3),
)
def test_the_truth_lies_within_the_uncertainty(
    offset: float,
    drift: float,
    start: float,
    trips: list[tuple[float, float]],
    pause: float,
    fast: float,
) -> None:
    def theirs(ours: float) -> float:
        return (ours - offset) / (1 + drift)

    probes = []
    at = start
    for i, (there, back) in enumerate(trips):
        if i % max(1, int(WINDOW_SECONDS / pause / 2)) == 0:
            there = back = fast  # now and then the network is quick
        probes.append(Probe(0, 1, at, theirs(at + there), at + there + back))
        at += pause
    clock = fit(1, probes)
    assert clock.probes == len(probes)
    # Within one window drift is not told apart from the probes' own noise.
    slack = 2 * abs(drift) * WINDOW_SECONDS + 1e-9 * (abs(offset) + at)
    for probe in probes:
        ours = probe.answered * (1 + drift) + offset
        assert abs(clock.shift(probe.answered) - ours) <= clock.uncertainty + slack


@given(st.lists(st.tuples(delays, delays), min_size=1), st.lists(st.floats(0, 100), min_size=2))
def test_order_is_kept(trips: list[tuple[float, float]], moments: list[float]) -> None:
    probes = [Probe(0, 1, float(i), 5.0 + i, i + a + b) for i, (a, b) in enumerate(trips)]
    clock = fit(1, probes)
    moments.sort()
    mapped = [clock.shift(moment) for moment in moments]
    assert mapped == sorted(mapped)


@given(st.floats(0.1, 5.0), st.integers(0, 9))
def test_one_slow_answer_does_not_matter(slow: float, place: int) -> None:
    probes = [Probe(0, 1, i * 0.5, i * 0.5 + 0.001, i * 0.5 + 0.002) for i in range(10)]
    at = place * 0.5
    probes.insert(place, Probe(0, 1, at, at + slow, at + slow))
    clock = fit(1, probes)
    assume(slow > 0.01)
    assert abs(clock.shift(1.0) - 1.0) < 1e-6
    # It lies past the others, and their drift was not told apart.
    assert clock.uncertainty <= 0.001 + USUAL_DRIFT * slow + 1e-9


def test_a_run_without_probes_has_no_offsets() -> None:
    nodes = [NodeRecord(0, 0, 0, "draft", 1), NodeRecord(1, 0, 0, "verify", 1)]
    assert estimate(nodes) == {0: ClockFit(0), 1: ClockFit(1)}
