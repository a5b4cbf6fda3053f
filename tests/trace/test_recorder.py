"""The recorder: bounded, counted, cheap to ask."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.machine import Received, TimerFired
from asyncspec.trace.recorder import LINE_BYTES, Recorder
from asyncspec.trace.records import Dropped, NodeRecord, Record, Step, packed_bytes
from asyncspec_protocol.framing import decode, encode
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import PruneIndices, Segment


def recorder(most: int = 100, now: float = 0.0) -> Recorder:
    return Recorder(NodeRecord(1, 0.0, 0.0, "verify", 1), max_lines=most, clock=lambda: now)


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


@given(st.lists(st.integers(0, 3000), max_size=30), st.integers(1, 12))
def test_lines_of_any_length_take_a_bounded_number_of_bytes(sizes: list[int], most: int) -> None:
    target = recorder(most)
    for i, size in enumerate(sizes):
        target.stepped(TimerFired(size * "x"), (), (), float(i), float(i))
        kept, end = target.read(target.since(-1), most)
        numbers = [line.number for line in kept if isinstance(line, Step)]
        assert numbers == list(range(end - len(numbers), i + 1)), "the newest ones"
        held = sum(map(packed_bytes, kept))
        assert held <= most * LINE_BYTES or len(numbers) == 1
        # No line is dropped without need.
        oldest = numbers[0]
        if oldest and len(numbers) < most:
            assert held + sizes[oldest - 1] > most * LINE_BYTES - 100


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=30), st.integers(1, 9000))
def test_a_read_is_bounded_in_bytes(sizes: list[int], most_bytes: int) -> None:
    """But for its first line: a frame that is too long for the network is none."""
    target = recorder(1000)
    for i, size in enumerate(sizes):
        target.stepped(TimerFired(size * "x"), (), (), float(i), float(i))
    lines: list[Record] = []
    number = 0
    while number < target.end:
        more, number = target.read(number, 1000, most_bytes)
        assert len(more) == 1 or sum(map(packed_bytes, more)) <= most_bytes
        lines += more
    assert [line.number for line in lines if isinstance(line, Step)] == list(range(len(sizes)))


def test_full_prunes_take_a_few_megabytes() -> None:
    """Each takes 650 KB: its ids are large, and all of them are its own."""
    most = 1000
    target = recorder(most)
    frame = encode(PruneIndices(0, 1, 2**50, (), tuple(range(2**50, 2**50 + 16_384))))
    tracemalloc.start()
    try:
        for _ in range(100):
            target.stepped(Received(Rank(0), decode(frame).message), (), (), 0.0, 0.0)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 12 * most * LINE_BYTES  # of a number's bytes at most
    assert target.end == 100


def test_no_handle_is_kept() -> None:
    target = recorder()
    handle = object()
    target.stepped(Received(Rank(0), Segment(0, 0, 0, (0,), (-1,)), handle), (), (), 0.0, 0.0)
    (line,), _ = target.read(0, 1)
    assert isinstance(line, Step)
    assert line.input.tensor is True  # type: ignore[union-attr]
