"""The logical clock of turns. That it agrees with virtual time is in tests/policy/test_order.py."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.stats import SlotClock
from asyncspec_protocol.ids import SegmentId

N = 4
FIRST = SlotClock().on_sent(SegmentId(0), drafted=False)


def sent(clock: SlotClock, *segments: int) -> SlotClock:
    for segment in segments:
        clock = clock.on_sent(SegmentId(segment), drafted=True)
    return clock


def test_a_segment_behind_another_takes_one_turn_more() -> None:
    clock = sent(FIRST, 1).on_verdict(SegmentId(0), N, 1)
    assert clock.now == N
    assert clock.on_verdict(SegmentId(1), N, 2).now == N + 1


def test_segments_that_shared_a_pass_share_a_turn() -> None:
    clock = sent(FIRST, 1, 2).on_verdict(SegmentId(0), N, 1)
    clock = clock.on_verdict(SegmentId(1), N, 2).on_verdict(SegmentId(2), N, 2)
    assert clock.now == N + 1


def test_segments_that_die_in_the_queue_take_no_turn_and_those_in_a_pass_do() -> None:
    clock = sent(FIRST, 1, 2).on_verdict(SegmentId(0), N, 1)
    assert clock.on_verdict(SegmentId(2), N, 2).now == N + 1
    assert clock.on_verdict(SegmentId(2), N, 3).now == N + 2


def test_a_draft_takes_the_part_of_a_turn_that_it_takes_and_one_at_most() -> None:
    for share, expected in ((0.25, 0.25), (1.0, 1.0), (7.0, 1.0)):
        clock = SlotClock().on_draft(0.0, share)
        assert sent(clock, 0).on_verdict(SegmentId(0), N, 1).now == expected + N
    twice = SlotClock().on_draft(0.0, 0.5)
    assert twice.on_draft(twice.source_free(), 0.25).drafted == 0.75


def test_a_late_segment_in_the_first_stage_delays_the_next() -> None:
    """The pass between began half a turn after the stage had become idle."""
    clock = sent(FIRST.on_draft(0.0, 1.0).on_draft(1.0, 0.5), 1, 2).on_verdict(SegmentId(0), N, 1)
    assert clock.on_verdict(SegmentId(2), N, 3).now == 2.5 + N


@given(st.lists(st.integers(-(10**18), 10**18), min_size=1, max_size=9))
def test_with_any_stage_reports_time_does_not_go_back(passes: list[int]) -> None:
    clock = sent(FIRST, *range(1, len(passes)))
    for segment, number in enumerate(passes):
        before, clock = clock.now, clock.on_verdict(SegmentId(segment), N, number)
        assert clock.now >= before


@given(st.floats(0, 1))
def test_a_miss_ends_what_is_being_drafted(share: float) -> None:
    """What is asked then begins at once."""
    clock = FIRST.on_verdict(SegmentId(0), N, 1)
    clock = clock.on_draft(clock.source_free(), share).on_miss()
    assert clock.source_free() == clock.now == N
