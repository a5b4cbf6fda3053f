"""How long a device may be at one job before it counts as hung."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.actor.watchdog import COLD_FACTOR, FACTOR, MIN_SAMPLES, DeviceWatchdog
from asyncspec.core.jobs import Admit, Compact, DraftBatch, Job, Release
from asyncspec.core.sampling import Sampling
from asyncspec_protocol.ids import SessionId, Version
from asyncspec_protocol.messages import Expand
from asyncspec_protocol.sampling import Constraint

FLOOR = 60.0
SESSION = SessionId(0)
EXPAND = Expand(SESSION, Version(0), 0, (1, 2), 1, 1, 1)


def sized(size: int) -> Job:
    """A job of some size."""
    return Compact(SESSION, 0, tuple(range(size)))


@given(
    st.lists(st.tuples(st.integers(1, 300), st.floats(0, 100)), max_size=50), st.integers(1, 300)
)
def test_a_limit_has_a_floor_and_is_many_times_what_such_jobs_take(
    jobs: list[tuple[int, float]], size: int
) -> None:
    watchdog = DeviceWatchdog(FLOOR)
    for rows, seconds in jobs:
        watchdog.observe(sized(rows), seconds)
    limit = watchdog.limit(sized(size))
    assert limit >= FLOOR
    if len(jobs) < MIN_SAMPLES:
        assert limit >= COLD_FACTOR * FLOOR
    if jobs and jobs[-1][0] == size:
        assert limit >= FACTOR * jobs[-1][1]


@pytest.mark.parametrize(
    "make",
    [
        lambda grammar: Admit(SESSION, 100, Sampling(constraint=Constraint(grammar))),
        lambda grammar: replace(EXPAND, grammar=grammar),
        lambda grammar: DraftBatch((EXPAND, replace(EXPAND, grammar=grammar))),
    ],
)
def test_a_job_that_reads_a_grammar_is_a_kind_of_its_own(make: Callable[[str], Job]) -> None:
    """Compiling one may take seconds, and says nothing of other jobs."""
    plain, constrained = make(""), make("start: /a/")
    watchdog = DeviceWatchdog(FLOOR)
    for _ in range(MIN_SAMPLES):
        watchdog.observe(plain, 1e-5)
    watchdog.observe(constrained, 100.0)
    assert watchdog.limit(plain) == FLOOR


def test_larger_jobs_than_any_before_have_time_for_their_rows() -> None:
    watchdog = DeviceWatchdog(FLOOR)
    for _ in range(MIN_SAMPLES):
        watchdog.observe(sized(4), 2.0)
    assert watchdog.limit(sized(4)) == FACTOR * 2.0
    assert watchdog.limit(sized(1)) == FACTOR * 2.0
    assert watchdog.limit(sized(64)) == FACTOR * 2.0 * 16


def test_a_slow_start_is_forgotten() -> None:
    watchdog = DeviceWatchdog(FLOOR)
    watchdog.observe(sized(4), 500.0)
    for _ in range(200):
        watchdog.observe(sized(4), 0.1)
    assert watchdog.limit(sized(4)) == FLOOR


def test_kinds_of_jobs_are_distinguished() -> None:
    watchdog = DeviceWatchdog(FLOOR)
    for _ in range(MIN_SAMPLES):
        watchdog.observe(sized(4), 0.1)
    assert watchdog.limit(Release(SESSION)) == COLD_FACTOR * FLOOR


def test_a_job_that_is_overdue_is_reported_in_seconds() -> None:
    watchdog, job = DeviceWatchdog(FLOOR), sized(4)
    for _ in range(MIN_SAMPLES):
        watchdog.observe(job, 0.1)
    service = (job, 100.0)
    assert not any(watchdog.check(service, 100.0 + second) for second in range(int(FLOOR)))
    text = watchdog.check(service, 100.0 + FLOOR + 1)
    assert text == (
        "the device has been busy with one job (Compact) for 61 s, and 60 s are the most that "
        "[limits] device_seconds allows: this node is given up"
    )
    # The next one has its own time.
    assert not watchdog.check((job, 162.0), 163.0)
    assert not watchdog.check(None, 500.0)
