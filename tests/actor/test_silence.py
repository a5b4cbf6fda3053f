"""Silent peers, on a virtual clock: gone machines, stopped processes, and such as are only slow."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.actor.link import LinkOptions
from asyncspec.actor.silence import LOST_BEATS, PathState, SilenceWatch

OPTIONS = LinkOptions()
INTERVAL, LONGEST = OPTIONS.heartbeat_seconds, OPTIONS.timeout_seconds


class Line:
    """A link that checks every interval, and as much later as it is held up itself. Its own
    heartbeats are acknowledged after ``trip`` seconds, until the cable is pulled at ``cut``; the
    peer's process sends its own until ``stop``. Time is virtual."""

    def __init__(self, trip: float, *, cut: float = 1e9, stop: float = 1e9) -> None:
        self.now = 0.0
        self._trip = trip
        self._cut = cut
        self._stop = stop
        self._watch = SilenceWatch(INTERVAL, LONGEST, 0.0)
        self._sent: list[float] = [0.0]
        self._last = 0.0

    def run(self, lateness: Sequence[float], *, data: bool = False) -> str:
        """Why the peer is gone, or nothing. ``data``: some was written just before every check."""
        for late in lateness:
            self.now += INTERVAL + late
            last = min(self.now, self._cut, self._stop)
            if last - self._last >= INTERVAL:
                self._watch.received()
                self._last = last
            if reason := self._watch.check(self._path(data=data), self.now):
                return reason
            self._sent.append(self.now)
        return ""

    def _path(self, *, data: bool) -> PathState:
        arrived = [at + self._trip for at in self._sent if at + self._trip / 2 < self._cut]
        acknowledged = [at for at in arrived if at <= self.now]
        waits = len(acknowledged) < len(self._sent)
        return PathState(waits or data, self.now - max(acknowledged, default=0.0))


def punctual(seconds: float) -> list[float]:
    return [0.0] * round(seconds / INTERVAL)


@given(st.floats(0, 0.3), st.floats(1, 30))
def test_an_unplugged_machine_is_gone_within_three_seconds(trip: float, cut: float) -> None:
    line = Line(trip, cut=cut)
    assert "no acknowledgement in 2 s" in line.run(punctual(60))
    assert line.now - cut < 3 + trip


@pytest.mark.parametrize("seconds", [1, 5, 9.5])
def test_a_process_that_is_stopped_for_less_than_the_limit_is_kept(seconds: float) -> None:
    line = Line(0.0, stop=2.0)
    assert line.run(punctual(2 + seconds)) == ""
    line._stop = 1e9
    assert line.run(punctual(60)) == ""


def test_a_process_that_is_stopped_for_good_is_gone() -> None:
    line = Line(0.0, stop=2.0)
    assert line.run(punctual(60)) == f"silent for {LONGEST:.2g} s"
    assert 2 + LONGEST <= line.now <= 2 + LONGEST + 2 * INTERVAL


@given(st.floats(0, 0.3), st.lists(st.floats(0, 30), max_size=40), st.booleans())
def test_a_machine_that_acknowledges_is_kept_however_late_the_checks_are(
    trip: float, lateness: list[float], data: bool
) -> None:
    """Busy cores hold this node up, or it is stopped: what it has slept is no silence."""
    assert Line(trip).run(lateness, data=data) == ""


@given(st.lists(st.floats(0, 600), max_size=LOST_BEATS - 1))
def test_what_this_node_has_slept_is_no_wait_for_an_acknowledgement(slept: list[float]) -> None:
    """What waits for one was written just now, after a sleep."""
    watch, now = SilenceWatch(INTERVAL, LONGEST, 0.0), 0.0
    for seconds in slept:
        now += seconds
        assert watch.check(PathState(True, now), now) == ""


def test_silence_alone_counts_where_the_system_says_nothing_of_the_path() -> None:
    watch = SilenceWatch(INTERVAL, LONGEST, 0.0)
    checks = [watch.check(None, INTERVAL * n) for n in range(1, 22)]
    assert checks == [*[""] * 20, f"silent for {LONGEST:.2g} s"]
