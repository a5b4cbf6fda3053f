"""A pass of the first stage waits for sessions that are about to come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.cost_model.passes import PassSeconds
from asyncspec.core.cost_model.return_time import ReturnTime
from asyncspec.core.jobs import Batch, Forward
from asyncspec.core.machine import Compute, Effect, LinkDown, Received, SetTimer, TimerFired
from asyncspec_nodes.roles.verify.pass_sharing import SHARE_DEADLINE, best_deadline
from asyncspec_protocol.ids import DRAFT, SessionId
from asyncspec_protocol.messages import Close
from nodes.machine_driver import Driven, done, opening, segment, stage

LATEST = pytest.approx(13.3)


def comes(session: int, number: int) -> Received:
    """A token of plain decoding."""
    return Received(DRAFT, segment(number, {number: number - 1}, session=session))


def ends(driven: Driven, at: float) -> list[Effect]:
    """The running pass, which takes a second."""
    job = driven.state.running.job
    return driven.at(at, done(job, tuple(9 for _ in job.sampled_rows), 1.0))


def started(effects: list[Effect]) -> list[tuple[SessionId, ...]]:
    """The sessions of each pass."""
    jobs = [e.job for e in effects if isinstance(e, Compute)]
    passes = [one for one in jobs if isinstance(one, Forward | Batch)]
    return [tuple(p.session for p in (j.passes if isinstance(j, Batch) else (j,))) for j in passes]


def waiting() -> Driven:
    """Of two sessions that are away for .2 seconds after their passes one waits for the other."""
    first = stage()
    first.feed(Received(DRAFT, opening(1, session=1)))
    first.at(10.0, comes(0, 0))
    first.at(10.5, comes(1, 0))
    assert started(ends(first, 11.0)) == [(1,)]
    first.at(11.2, comes(0, 1))
    # How long session 1 is away is not known yet.
    assert started(ends(first, 12.0)) == [(0,)]
    first.at(12.2, comes(1, 1))
    effects = ends(first, 13.0)
    assert started(effects) == []
    assert effects[-1] == SetTimer(SHARE_DEADLINE, LATEST)
    return first


def test_both_are_in_one_pass() -> None:
    effects = waiting().at(13.2, comes(0, 2))
    assert started(effects) == [(1, 0)]
    assert effects[-1] == SetTimer(SHARE_DEADLINE, None)


@pytest.mark.parametrize("early", [0.0, 1e-9])
def test_one_that_does_not_come_costs_one_bounded_wait(early: float) -> None:
    """Timers may be early by the resolution of their clock."""
    first = waiting()
    assert started(first.at(13.3 - early, TimerFired(SHARE_DEADLINE))) == [(1,)]
    ends(first, 14.3)
    assert started(first.at(14.5, comes(1, 2))) == [(1,)]


def test_nobody_waits_for_a_session_that_is_over() -> None:
    assert started(waiting().at(13.1, Received(DRAFT, Close(SessionId(0))))) == [(1,)]


def test_a_wait_ends_with_its_sessions() -> None:
    first = waiting()
    first.at(13.1, LinkDown(DRAFT))
    assert first.at(13.3, TimerFired(SHARE_DEADLINE)) == []
    assert first.state.waiting is None


returns = st.builds(
    ReturnTime,
    left=st.sampled_from((-2.0, -1.0, 0.0)),
    rows=st.integers(1, 9),
    seconds=st.floats(0.01, 9),
    deviation=st.floats(0, 3),
)


@given(st.integers(1, 9), st.lists(returns, min_size=1, max_size=6), st.integers(1, 5))
def test_a_wait_ends_with_a_return_within_a_pass(
    rows: int, away: list[ReturnTime], stages: int
) -> None:
    """It is for at least one of the sessions, and none where rows cost what passes of them do."""
    until = best_deadline(rows, away, lambda count: 1.0, stages, 0.0)
    assert until is None or (until < 1.0 and until in {one.latest for one in away})
    assert best_deadline(rows, away, float, stages, -9.0) is None


whole_returns = st.builds(
    ReturnTime,
    left=st.integers(0, 5).map(float),
    rows=st.integers(1, 9),
    seconds=st.integers(0, 20).map(float),
)


def by_definition(
    rows: int, away: Sequence[ReturnTime], seconds: PassSeconds, stages: int, since: float
) -> float | None:
    """As the module has it: a round with each number of sessions that come back first."""

    def round_of(ready: int, left: Sequence[ReturnTime], later: float = 0.0) -> float:
        groups = Counter[float | None]()
        for one in left:
            groups[one.left] += one.rows
        passes = [seconds(ready), *(seconds(group) for group in groups.values() if group)]
        return max(longest + later + max(passes), sum(passes))

    longest, alone = max(one.seconds for one in away), seconds(rows)
    apart, order = round_of(rows, away), sorted(away, key=lambda one: one.latest)
    best, until = 0.0, None
    for count, one in enumerate(order, 1):
        joined = sum(other.rows for other in order[:count])
        later = (stages - 1) * (seconds(rows + joined) - max(alone, seconds(joined)))
        gain = apart - round_of(rows + joined, order[count:], later)
        worth = PARAMETERS.sharing_rounds * gain - (one.latest - since)
        if worth > best and one.latest - since < alone:
            best, until = worth, one.latest
    return until


@given(
    st.integers(1, 9),
    st.lists(whole_returns, min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_a_pass_waits_for_those_that_shorten_a_round_most(
    rows: int, away: list[ReturnTime], stages: int, row: int
) -> None:
    """Sums of whole seconds are exact."""

    def seconds(count: float) -> float:
        return 20.0 + row * count

    found = best_deadline(rows, away, seconds, stages, 0.0)
    assert found == by_definition(rows, away, seconds, stages, 0.0)


def test_the_time_of_a_wait_grows_with_the_sessions() -> None:
    """Each group's pass is looked up once for each of its sessions, not once for every session."""

    def looks(sessions: int) -> int:
        asked: list[float] = []

        def seconds(rows: float) -> float:
            asked.append(rows)
            return 1.0

        away = [ReturnTime(float(i), 1, 1e4, 0.0) for i in range(sessions)]
        best_deadline(1, away, seconds, 3, 0.0)
        return len(asked)

    assert looks(200) < 12 * looks(20)
