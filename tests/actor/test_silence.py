"""Silent peers, on a virtual clock: gone machines, stopped processes, and such as are only slow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.actor.silence import (
    LATE_FACTOR,
    LEAST_SILENCE_SECONDS,
    QUIET_SHARE,
    PathState,
    SilenceWatch,
    beat_due,
    beat_seconds,
    next_check,
    path_limit,
)

MOST = 10.0
LAN = PathState(False, 0.0, 40e-3, 15e-3, 0.2e-3)  # delayed acknowledgements: 40 ms
LAN_TRIPS = LAN.srtt, LAN.rttvar, LAN.least_rtt
WAN = PathState(False, 0.0, 120e-3, 20e-3, 100e-3)

rtts = st.floats(0, 2)
paths = st.builds(PathState, st.booleans(), st.floats(0, 60), rtts, rtts, rtts)


def hear(watch: SilenceWatch, interval: float, now: float) -> None:
    """A heartbeat comes."""
    watch.received(interval, now)
    watch.beat()


class Line:
    """A link with a peer that beats as it does; time is virtual."""

    def __init__(self, path: PathState = LAN, most: float = MOST) -> None:
        self.path = path
        self.interval = self.pause = beat_seconds(path.least_rtt, 1.0)
        self.watch = SilenceWatch(most, 0.0)
        self.now = 0.0
        self.beats: Iterator[float] = iter(())
        self.next_beat = 0.0

    def hear(self, lateness: Iterator[float]) -> None:
        """The peer's heartbeats from now on, each so late."""
        self.beats, self.next_beat = lateness, self.now
        self._beat()

    def _beat(self) -> None:
        late = next(self.beats, None)
        self.next_beat = float("inf") if late is None else self.next_beat + self.interval + late

    def run(self, seconds: float, *, cut: bool = False) -> str:
        """Until the peer counts as lost, or so long; ``cut``: nothing is acknowledged."""
        start = end = self.now
        while self.now < start + seconds:
            end += self.pause
            while self.next_beat <= end:
                hear(self.watch, self.interval, self.next_beat)
                self._beat()
            path = PathState(cut, end - start if cut else 0.0, *self._trips())
            reason = self.watch.check(path, self.interval, end)
            self.pause = self.watch.pause(path, self.interval)
            self.now = end
            if reason:
                return reason
        return ""

    def _trips(self) -> tuple[float, float, float]:
        return self.path.srtt, self.path.rttvar, self.path.least_rtt


def punctual(seconds: float = 60) -> Iterator[float]:
    return iter([0.0] * int(seconds / 0.2))


@pytest.mark.parametrize("age", [2, 2.1, 30])
@pytest.mark.parametrize(("path", "most"), [(LAN, 0.8), (WAN, 2.5)])
def test_a_machine_that_is_gone_is_noticed(path: PathState, most: float, age: float) -> None:
    """Also where its link is two seconds old."""
    line = Line(path)
    line.hear(punctual())
    assert line.run(age) == ""
    line.hear(iter(()))
    start = line.now
    assert line.run(60, cut=True)
    assert line.now - start < most


def test_a_machine_that_is_gone_is_noticed_at_once_also_behind_a_slow_process() -> None:
    line = Line()
    line.hear(iter([0.5] * 40))
    assert line.run(15) == ""
    line.hear(iter(()))
    assert "no acknowledgement in" in line.run(60, cut=True)
    assert line.now - 15 < 1.0 + line.interval


@pytest.mark.parametrize("age", [2, 2.1, 30])
@pytest.mark.parametrize(("path", "most"), [(LAN, 0.8), (WAN, 3.0)])
def test_a_stopped_process_is_noticed(path: PathState, most: float, age: float) -> None:
    line = Line(path)
    line.hear(punctual())
    assert line.run(age) == ""
    line.hear(iter(()))
    start = line.now
    assert line.run(60).startswith("silent for ")
    assert line.now - start < most


@given(st.floats(0, 0.6), st.integers(0, 10))
def test_a_process_on_busy_cores_is_kept(late: float, punctual: int) -> None:
    """A pass, or other programs, hold it up, and some beats later for three times as long."""
    line = Line()
    lateness = [late, *[0.0] * punctual, 3 * late, 0.0]
    line.hear(iter(lateness))
    assert line.run(len(lateness) * line.interval + sum(lateness) - 0.2) == ""


def test_a_node_that_is_late_itself_gives_its_peers_time() -> None:
    """Of two processes on busy cores one may run and the other not."""
    line = Line()
    line.hear(punctual())
    assert line.run(30) == ""
    for late, limit in ((0.1, 1.6), (30.0, 2.6)):
        line.now += line.interval + late
        line.watch.received(line.interval, line.now)
        assert line.watch.check(line.path, line.interval, line.now) == ""
        assert line.watch.limit(line.path, line.interval) == pytest.approx(limit)
    line.hear(punctual())
    assert line.run(5) == ""
    assert line.watch.limit(line.path, line.interval) < 1.1 * LEAST_SILENCE_SECONDS


@pytest.mark.parametrize(("load", "most"), [(0.0, 0.8), (2.0, 0.8), (8.0, 3.0), (1e3, MOST + 0.3)])
def test_processes_have_more_time_where_more_run_than_can(load: float, most: float) -> None:
    """A garbage collection, or the first pages of a program from a disk, may take seconds there."""
    line = Line()
    line.hear(punctual())
    assert line.run(30) == ""
    line.watch.load = load
    line.hear(iter(()))
    start = line.now
    assert line.run(60).startswith("silent for ")
    assert most / 1.25 < line.now - start < most
    line = Line()
    line.hear(punctual())
    assert line.run(30) == ""
    line.hear(iter(()))
    line.watch.load, start = load, line.now
    assert line.run(60, cut=True)
    assert line.now - start < 1.0


@given(st.floats(0, 600), st.floats(0.05, 1))
def test_what_this_node_has_slept_is_no_silence(slept: float, interval: float) -> None:
    """It has not read what waits for it."""
    watch = SilenceWatch(MOST, 0.0)
    assert watch.check(None, interval, slept) == ""


@given(st.floats(0, 600))
def test_what_this_node_has_slept_is_no_wait_for_an_acknowledgement(slept: float) -> None:
    """A heartbeat that it was about to send goes out when it is awake again."""
    watch = SilenceWatch(MOST, 0.0)
    assert watch.check(LAN, 0.2, 0.2) == ""
    just_sent = PathState(True, slept + 0.1, *LAN_TRIPS)
    assert watch.check(just_sent, 0.2, 0.2 + slept) == ""


def test_an_acknowledgement_that_is_rounded_up_came_after_the_last_check() -> None:
    """The kernel counts in jiffies. The heartbeat was acknowledged at once; what was written just
    now is not yet. To a client a second lies between two checks, more than a LAN may take."""
    watch = SilenceWatch(MOST, 0.0)
    assert watch.check(LAN, 1.0, 1.0) == ""
    rounded = PathState(True, 1.008, *LAN_TRIPS)
    assert path_limit(rounded) < 1.0
    assert watch.check(rounded, 1.0, 2.0) == ""


@given(st.one_of(st.none(), paths), st.lists(st.floats(0, 30), max_size=30))
def test_limits_stay_within_bounds(path: PathState | None, silences: list[float]) -> None:
    watch, now = SilenceWatch(MOST, 0.0), 0.0
    for seconds in silences:
        now += seconds
        watch.check(path, 0.2, now)
        hear(watch, 0.2, now)
        assert LEAST_SILENCE_SECONDS <= watch.limit(path, 0.2) <= MOST


@given(paths, st.floats(0, 1))
def test_a_worse_path_gets_more_time(path: PathState, more: float) -> None:
    worse = PathState(
        path.unacknowledged,
        path.since_acknowledgement,
        path.srtt + more,
        path.rttvar + more,
        path.least_rtt + more,
    )
    assert path_limit(worse) >= path_limit(path)
    # Two retransmissions on any path, three where packets may be lost.
    timeout = path.srtt + max(0.2, 4 * path.rttvar)
    assert path_limit(path) >= (7 if path.least_rtt >= 0.02 else 3) * timeout * (1 - 1e-9)


@given(rtts, st.floats(0.01, 60))
def test_heartbeats_follow_the_round_trip(rtt: float, most: float) -> None:
    assert min(0.2, most) <= beat_seconds(rtt, most) <= most
    assert beat_seconds(rtt, most) >= min(most, 2 * rtt)


class Sender:
    """A node that writes at some times, and heartbeats as the rule has it; time is virtual."""

    def __init__(self, interval: float, writes: list[float]) -> None:
        self.sent: list[tuple[float, bool]] = []  # with whether it was a heartbeat
        now = at = 0.0
        written = beat = -math.inf
        end = sum(writes) + 3.0
        for pause in [*writes, math.inf]:
            while at < min(now + pause, end):
                if beat_due(interval, 1.0, at - written, at - beat):
                    self.sent.append((at, True))
                    written = beat = at
                at = next_check(at, interval, interval)
            now += pause
            if pause < math.inf:
                self.sent.append((now, False))
                written = now

    def gaps(self) -> list[float]:
        """Between what is sent."""
        times = [at for at, _ in self.sent]
        return [b - a for a, b in pairwise(times)]


intervals = st.sampled_from([0.2, 0.24, 0.5, 1.0])
traffic = st.lists(st.floats(0.001, 2), max_size=40)


@given(intervals, traffic)
def test_no_gap_is_longer_than_is_taken_for_punctual(interval: float, writes: list[float]) -> None:
    sender = Sender(interval, writes)
    assert max(sender.gaps(), default=0.0) <= (1 + QUIET_SHARE) * interval + 1e-9
    watch = SilenceWatch(MOST, 0.0)
    for at, beat in sender.sent:
        watch.received(interval, at)
        if beat:
            watch.beat()
    assert watch._lateness < 1e-9


@given(intervals, traffic, st.floats(0.01, 0.09))
def test_heartbeats_report_at_least_once_a_second(
    interval: float, writes: list[float], pause: float
) -> None:
    """Whatever else is written: the round trip, and how fast the link is."""
    dense = [pause] * int(4 / pause)
    beats = [at for at, beat in Sender(interval, [*writes, *dense]).sent if beat]
    assert max(b - a for a, b in pairwise(beats)) <= max(1.0, interval) + interval


@given(st.floats(0.001, 0.09), st.floats(0, 1))
def test_traffic_takes_the_place_of_heartbeats(pause: float, first: float) -> None:
    """But for the one a second that reports."""
    sender = Sender(0.2, [first, *[pause] * 150])
    end = first + 150 * pause
    assert sum(beat for at, beat in sender.sent if first + 0.2 < at < end) <= end - first + 1


@given(traffic, st.floats(0, 1), st.booleans())
def test_a_loss_is_noticed_in_time_whatever_the_traffic(
    writes: list[float], phase: float, gone: bool
) -> None:
    """On a LAN in less than a second from the last bytes: a stopped process, or a machine that
    is gone, whose checks fall anywhere between the peer's."""
    interval, sender = 0.2, Sender(0.2, [min(one, 0.3) for one in writes])
    watch, at = SilenceWatch(MOST, 0.0), phase * 0.2
    last, arrivals = sender.sent[-1][0], list(sender.sent)
    while True:
        while arrivals and arrivals[0][0] <= at:
            came, beat = arrivals.pop(0)
            watch.received(interval, came)
            if beat:
                watch.beat()
        silent = max(0.0, at - last)
        path = None if watch.has_received else PathState(gone and silent > 0, silent, *LAN_TRIPS)
        if watch.check(path, interval, at):
            break
        at = next_check(at, watch.pause(path, interval), interval)
    assert last < at < last + 1.0


@given(st.floats(0, 1e6), st.floats(0, 1), intervals)
def test_checks_are_at_common_times_and_not_late(now: float, share: float, interval: float) -> None:
    at = next_check(now, share * interval, interval)
    assert now < at + 1e-9 <= now + 1.02 * interval + 2e-9
    if share == 1:
        assert at / interval == pytest.approx(round(at / interval), abs=1e-6)


def test_a_peer_that_sends_no_heartbeats_is_quick_to_nobody() -> None:
    watch = SilenceWatch(MOST, 0.0)
    watch.received(0.2, 0.0)
    assert watch.limit(LAN, 0.2) == MOST
    hear(watch, 0.2, 0.0)
    assert watch.limit(LAN, 0.2) < 3


def test_a_slow_pace_is_no_silence_of_a_faster_one() -> None:
    watch = SilenceWatch(MOST, 0.0)
    for now in range(60):
        hear(watch, 1.0, now)
        assert watch.check(None, 1.0, now) == ""
    assert watch.check(None, 1.0, 60.0) == ""
    watch.restart()
    assert watch.check(None, 0.2, 60.0) == ""
    assert watch.check(None, 0.2, 60.2) == ""


def test_lateness_is_forgotten() -> None:
    line = Line()
    line.hear(iter([0.8, *punctual(60)]))
    line.run(2)
    assert line.watch.limit(LAN, line.interval) > LATE_FACTOR * 0.5
    line.run(40)
    assert line.watch.limit(LAN, line.interval) < 1.0


def test_an_idle_link_has_nothing_to_acknowledge() -> None:
    """Of a slow heartbeat: the last acknowledgement is old when the next beat is sent."""
    watch = SilenceWatch(MOST, 0.0)
    for tick in range(1, 9):
        hear(watch, 5.0, 5.0 * tick)
        # Sent at the last check, and acknowledged soon after; something else was sent just now.
        path = PathState(True, 4.95, 1e-3, 1e-3, 1e-3)
        assert watch.check(path, 5.0, 5.0 * tick) == ""
