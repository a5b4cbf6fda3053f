"""A paced device: the real work is done, no sooner than the pace allows, and can be given up."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.backend.paced import LEAD, Pace, Paced
from asyncspec.core.costs import DraftCost, StageCost
from asyncspec.core.jobs import DraftBatch, Forward, Job, Release, Row
from asyncspec_protocol.messages import Expand


def forward(rows: int) -> Forward:
    return Forward(1, 1, 0, tuple(Row(i, i, (i,)) for i in range(rows)))


def expand(depth: int, count: int = 8, session: int = 1) -> Expand:
    return Expand(session, 0, 0, (5,), depth, 2, count)


class Clock:
    """A clock of waits alone: what a busy machine adds is no pace's."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Waited(threading.Event):
    """An event that nobody sets while it is waited for."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        if not self.is_set():
            self._clock.sleep(timeout)
        return self.is_set()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    threads = SimpleNamespace(Lock=threading.Lock, Event=lambda: Waited(made))
    monkeypatch.setattr("asyncspec.backend.paced.time", made)
    monkeypatch.setattr("asyncspec.backend.paced.threading", threads)
    return made


PACE = Pace(StageCost(0.04, 16, 0.001), DraftCost(0.005, 0.001), layers=4)


@pytest.mark.parametrize(
    ("job", "seconds", "steps"),
    [
        (forward(16), 0.04, 4),
        (forward(18), 0.042, 4),
        (expand(5), 0.026, 5),
        (expand(0, 0), 0.006, 1),
        (DraftBatch((expand(2), expand(5, session=2), expand(0, 0, 3))), 0.026, 5),
        (Release(1), 0.0, 1),
    ],
)
def test_a_pass_costs_its_rows_and_a_tree_its_levels(job: Job, seconds: float, steps: int) -> None:
    found = PACE.steps(job)
    assert found[0] == pytest.approx(seconds)
    assert found[1] == steps


@given(st.integers(1, 40), st.integers(1, 40))
def test_more_rows_never_cost_less(few: int, more: int) -> None:
    low, high = sorted((few, more))
    assert PACE.steps(forward(low)) <= PACE.steps(forward(high))


def test_the_work_is_done_and_takes_no_less_than_the_pace(clock: Clock) -> None:
    done: list[Job] = []

    def run(job: Job) -> int:
        done.append(job)
        return 7

    paced = Paced(run, done.append, PACE)
    assert paced.run(forward(1)) == 7
    assert clock.now == pytest.approx(0.04)
    assert done == [forward(1)]


def test_a_job_that_is_given_up_ends_with_the_step_it_is_in() -> None:
    job, begun = forward(1), threading.Event()
    slow = Pace(StageCost(600.0, 16, 0.0), layers=600_000)
    paced = Paced(lambda job: begun.set(), lambda job: None, slow)
    running = threading.Thread(target=paced.run, args=(job,))
    running.start()
    begun.wait()
    paced.abandon(job)
    running.join(timeout=240)
    assert not running.is_alive()


def test_a_job_that_was_given_up_before_its_turn_costs_one_step_and_no_other_job_less(
    clock: Clock,
) -> None:
    useless, next_one = forward(1), forward(2)
    reported: list[Job] = []
    paced = Paced(lambda job: None, reported.append, PACE)
    paced.abandon(useless)
    assert reported == [useless]
    times = []
    for job in (useless, next_one):
        paced.run(job)
        times.append(clock.now)
    assert times == pytest.approx([0.01, 0.05])


def test_a_batch_keeps_its_pace_until_all_its_trees_are_abandoned(clock: Clock) -> None:
    trees = (expand(4), expand(4, session=2))
    slow = Pace(source=DraftCost(0.03))
    for given_up, seconds in ((1, 0.12), (2, 0.03)):
        paced = Paced(lambda job: None, lambda job: None, slow)
        for tree in trees[:given_up]:
            paced.abandon(tree)
        start = clock.now
        paced.run(DraftBatch(trees))
        assert clock.now - start == pytest.approx(seconds), "the level it is in, and no more"


def test_the_work_is_done_amid_the_wait(clock: Clock) -> None:
    begun: list[float] = []
    paced = Paced(lambda job: begun.append(clock.now), lambda job: None, Pace(StageCost(0.01)))
    for _ in range(20):
        start = clock.now
        paced.run(forward(1))
    # It is known by now that it takes hardly any time.
    assert 0.5 * LEAD * 0.01 <= begun[-1] - start <= LEAD * 0.01
    assert clock.now - start == pytest.approx(0.01)
