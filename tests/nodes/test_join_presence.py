"""When a machine that has joined counts as suspected and as gone; time is virtual."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec_nodes.node import listen
from asyncspec_nodes.plugins.join.connection import refuses
from asyncspec_nodes.plugins.join.presence import (
    GONE_SECONDS,
    PING_SECONDS,
    STOPPED_SECONDS,
    SUSPECT_SECONDS,
    Presence,
    State,
)


def states(until: float, hears: Callable[[float], bool], end: float = 1e9) -> list[State]:
    """At each tick up to ``until``. ``hears``: whether a ping has come since the last tick;
    ``end``: of the connection."""
    presence, found = Presence(), list[State]()
    for tick in range(1, round(until / PING_SECONDS) + 1):
        now = tick * PING_SECONDS
        if hears(now):
            presence.received()
        presence.tick()
        if now >= end:
            presence.disconnected()
        found.append(presence.state)
    return found


@given(st.integers(1, 100))
def test_an_unplugged_machine_is_suspected_after_a_second_and_gone_within_three(tick: int) -> None:
    """The kernel ends the connection ``GONE_SECONDS`` after the first ping that is not
    acknowledged."""
    cut = tick * PING_SECONDS
    end = cut + PING_SECONDS + GONE_SECONDS
    found = states(cut + 3, lambda now: now <= cut, end)
    assert found[tick - 1] == "here"
    suspected = (found.index("suspected") + 1) * PING_SECONDS - cut
    assert SUSPECT_SECONDS <= suspected <= SUSPECT_SECONDS + PING_SECONDS
    assert (found.index("gone") + 1) * PING_SECONDS - cut < 3


@given(st.lists(st.integers(0, 20), min_size=1, max_size=20))
def test_a_machine_whose_pings_come_late_is_never_gone(gaps: list[int]) -> None:
    """Stopped, or busy, for less than ``STOPPED_SECONDS`` while its kernel acknowledges."""
    ticks = {sum(min(gap, 10) + 1 for gap in gaps[:n]) for n in range(len(gaps) + 1)}
    found = states(max(ticks) * PING_SECONDS, lambda now: round(now / PING_SECONDS) in ticks)
    assert "gone" not in found


def test_a_machine_that_is_stopped_for_good_is_gone() -> None:
    found = states(20, lambda now: now <= 1)
    assert (found.index("gone") + 1) * PING_SECONDS == pytest.approx(
        1 + STOPPED_SECONDS, abs=PING_SECONDS
    )


def test_a_machine_that_connects_again_in_time_was_only_suspected() -> None:
    """Something between has ended the connection: both ends live."""
    found = states(1 + GONE_SECONDS - PING_SECONDS, lambda now: now <= 1, end=1.5)
    assert "suspected" in found
    assert "gone" not in found


@given(st.lists(st.booleans(), max_size=60), st.floats(0, 20))
def test_who_is_gone_stays_so_until_it_is_heard(pings: list[bool], end: float) -> None:
    found = states(len(pings) * PING_SECONDS, lambda now: pings[round(now / PING_SECONDS) - 1], end)
    for (before, now), came in zip(pairwise(found), pings[1:], strict=True):
        assert came or before != "gone" or now == "gone"


def test_a_process_that_has_ended_is_gone_at_once() -> None:
    presence = Presence()
    presence.disconnected()
    presence.has_ended = True
    assert presence.state == "gone"


@pytest.mark.asyncio
async def test_a_port_refuses_once_its_process_has_ended() -> None:
    sock = listen.loopback()
    places = [sock.getsockname()]
    assert not await refuses(places)
    sock.close()
    assert await refuses(places)
