"""The recorder: bounded, counted, cheap to ask."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.machine import Received, TimerFired
from asyncspec.trace.recorder import Recorder
from asyncspec.trace.records import Dropped, NodeRecord, Step
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import Segment


def recorder(most: int = 100, now: float = 0.0) -> Recorder:
    return Recorder(NodeRecord(1, 0.0, 0.0, "verify", 1), most=most, clock=lambda: now)


def fill(target: Recorder, count: int) -> None:
    for i in range(count):
        target.stepped(TimerFired(str(i)), (), (), float(i), float(i))


@given(st.integers(1, 20), st.integers(0, 60), st.integers(0, 60), st.integers(1, 9))
def test_a_reader_gets_each_line_once_or_its_count(
    most: int, before: int, after: int, chunk: int
) -> None:
    target = recorder(most)
    fill(target, before)
    lines, number = target.read(0, chunk)
    fill(target, after)
    while number < target.end:
        more, number = target.read(number, chunk)
        lines += more
    numbers = [line.number for line in lines if isinstance(line, Step)]
    dropped = sum(line.count for line in lines if isinstance(line, Dropped))
    assert numbers == sorted(set(numbers)), "no line twice, none out of order"
    assert len(numbers) + dropped == target.end
    # Steps are numbered anew by each ``fill``-ed recorder from 0, so the last is always there.
    assert not target.end or numbers[-1] == target.end - 1


@given(st.integers(0, 30), st.floats(0, 40))
def test_the_last_seconds(count: int, seconds: float) -> None:
    target = recorder(now=30.0)
    fill(target, count)
    lines, _ = target.read(target.since(seconds), 100)
    expected = [i for i in range(count) if i >= 30.0 - seconds]
    assert [line.number for line in lines if isinstance(line, Step)] == expected
    assert target.since(-1) == 0


def test_no_handle_is_kept() -> None:
    target = recorder()
    handle = object()
    target.stepped(Received(Rank(0), Segment(0, 0, 0, (0,), (-1,)), handle), (), (), 0.0, 0.0)
    (line,), _ = target.read(0, 1)
    assert isinstance(line, Step)
    assert line.input.tensor is True  # type: ignore[union-attr]
