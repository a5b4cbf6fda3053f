"""A pass waits for the tree below a new tip where that is due soon and shares it for nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.jobs import Batch, Forward, Job
from asyncspec.core.machine import Arm, Compute, Effect, Fired, Received
from asyncspec_nodes.roles.verify.redraft import MOST, TREE, Awaited
from asyncspec_protocol.ids import DRAFT, Rank
from asyncspec_protocol.messages import Close, Credit
from nodes.drive import Driven, done, following, heard, opening, outcome, prune, segment, stage

PASS = 0.5
TAKES = 0.2
"""Seconds: of a pass, and of a tree from the prune to its segment."""

times = st.integers(1, 100)


def learned(took: Sequence[float], rows: int = 4) -> Awaited:
    """Of trees of session 7 that took so many seconds each."""
    known, now = Awaited(), 0.0
    for seconds in took:
        known = known.moved(7, now).came(7, rows, now + seconds)
        now += 1000
    return known


def until(known: Awaited) -> float:
    assert known.until is not None
    return known.until


@given(st.lists(times, max_size=12), times, st.integers(-200, 200))
def test_only_a_tree_that_is_due_soon_is_waited_for(
    took: list[int], a_pass: float, free: float
) -> None:
    known = learned(took).moved(7, 0.0)
    if known.soon(7, free, a_pass):
        assert len(took) >= 3
        assert free + MOST * a_pass >= min(took)
        assert free < until(known.limited()) <= 1.5 * max(took)
    assert not known.soon(8, free, a_pass)
    assert not known.came(7, 1, 0.1).soon(7, free, a_pass)


@given(st.lists(times, min_size=3, max_size=12))
def test_a_tree_that_is_given_up_is_awaited_no_more(took: list[int]) -> None:
    known = learned(took).moved(7, 0.0)
    assert known.given_up() == known  # the deadline of an earlier one
    assert not known.limited().given_up().soon(7, 0.0, 1e9)


@given(st.lists(times, min_size=3, max_size=12))
def test_others_segments_are_no_trees(took: list[int]) -> None:
    known = learned(took).moved(7, 0.0)
    assert known.came(8, 5, 1.0) == known


def at_work(
    rank: int = 1,
    stages: int = 1,
    *,
    coalesce: bool = True,
    trees: int = 3,
    seconds: Callable[[int], float] = lambda rows: PASS,
) -> tuple[Driven, Forward]:
    """A stage that has seen some trees come, and has a pass in service since 100.0, over node 20.
    Two deeper nodes wait."""
    driven = stage(rank, stages, coalesce=coalesce)
    tip = 0
    taken(driven, 0, {0: -1}, 1.0, seconds)
    for n in range(1, trees + 1):
        driven.at(10.0 * n, prune(n, 3 * n, (tip,) if n > 1 else (), ()))
        # The first tree has three nodes, so that it is known what rows cost.
        tree = {3 * n + i: tip for i in range(3 if n == 1 else 1)}
        taken(driven, n, tree, 10.0 * n + TAKES, seconds)
        tip = 3 * n
    (job,) = jobs(driven.at(100.0, heard(driven, trees + 1, {20: tip})))
    assert isinstance(job, Forward)
    driven.at(100.01, heard(driven, trees + 2, {21: 20, 22: 21}))
    return driven, job


def taken(
    driven: Driven, number: int, nodes: dict[int, int], at: float, seconds: Callable[[int], float]
) -> None:
    """A segment has come and been computed."""
    (job,) = jobs(driven.at(at, heard(driven, number, nodes)))
    assert isinstance(job, Forward)
    took = seconds(len(nodes))
    driven.at(at + took, done(job, outcome(driven, job), took))


def jobs(effects: list[Effect]) -> list[Forward | Batch]:
    """Passes that begin."""
    asked = [effect.job for effect in effects if isinstance(effect, Compute)]
    return [job for job in asked if isinstance(job, Forward | Batch)]


def accepted(driven: Driven, at: float = 100.4) -> list[Effect]:
    """The draft node has made the node in service the tip, and drafts below it."""
    (session,) = [one for one in driven.state.sessions.values() if one.session == 0]
    known = session.liveness.version
    return driven.at(at, prune(known + 1, 23, (session.slots.tip, 20), (21, 22)))


def ended(driven: Driven, job: Forward, at: float = 100.5) -> list[Effect]:
    """That of the node in service."""
    return driven.at(at, done(job, outcome(driven, job), PASS))


def rows(job: Job) -> list[int]:
    """Of the segments in a pass."""
    passes = job.passes if isinstance(job, Batch) else (job,)
    return [len(one.rows) for one in passes]


def test_what_waits_shares_its_pass_with_the_tree() -> None:
    driven, job = at_work()
    assert following(accepted(driven)) == [None]
    effects = ended(driven, job)
    assert jobs(effects) == []
    (armed,) = [effect for effect in effects if isinstance(effect, Arm)]
    assert armed.timer == TREE
    assert armed.at == pytest.approx(100.4 + 1.5 * TAKES)
    (both,) = jobs(driven.at(100.6, heard(driven, 9, {23: 22, 24: 20})))
    assert rows(both) == [2, 2]


def test_a_tree_that_does_not_come_is_not_waited_for_any_longer() -> None:
    driven, job = at_work()
    accepted(driven)
    ended(driven, job)
    # Timers may be a moment early.
    (alone,) = jobs(driven.at(100.699, Fired(TREE)))
    assert rows(alone) == [2]
    assert jobs(driven.at(100.8, heard(driven, 9, {23: 22}))) == []


def test_nobody_waits_for_the_tree_of_a_session_that_is_over() -> None:
    driven, job = at_work()
    accepted(driven)
    driven.at(100.45, Received(DRAFT, Close(0)))
    driven.at(100.46, Received(DRAFT, opening(1, session=1)))
    ended(driven, job)
    (other,) = jobs(driven.at(100.55, Received(DRAFT, segment(0, {0: -1}, session=1))))
    assert rows(other) == [1]


@pytest.mark.parametrize(
    "options",
    [
        {"coalesce": False},
        {"rank": 2, "stages": 2},
        {"trees": 2},
        {"seconds": lambda rows: PASS * rows},
    ],
    ids=["not sharing passes", "later stage", "nothing known", "dear rows"],
)
def test_where_nothing_is_gained_nothing_waits(options: dict[str, object]) -> None:
    driven, job = at_work(**options)  # type: ignore[arg-type]
    accepted(driven)
    (next_one,) = jobs(ended(driven, job))
    assert rows(next_one) == [2]


def test_beside_others_nobody_is_waited_for() -> None:
    driven, job = at_work()
    driven.at(100.02, Received(DRAFT, opening(1, session=1)))
    accepted(driven)
    assert len(jobs(ended(driven, job))) == 1


def test_a_tree_that_is_late_before_the_stage_is_free_is_not_waited_for() -> None:
    driven, job = at_work()
    accepted(driven, 100.1)
    assert len(jobs(ended(driven, job))) == 1


def test_a_tree_that_takes_as_long_as_a_pass_is_not_waited_for() -> None:
    driven, job = at_work(seconds=lambda rows: TAKES)
    accepted(driven, 100.19)
    assert len(jobs(ended(driven, job, 100.2))) == 1


@pytest.mark.parametrize(("row_seconds", "begun"), [(0.0, 0), (0.2, 1)])
def test_a_line_that_cannot_carry_both_has_nothing_waited_for(
    row_seconds: float, begun: int
) -> None:
    driven, job = at_work(1, 2)
    driven.at(100.02, Received(Rank(2), Credit(1000, row_seconds=row_seconds)))
    accepted(driven)
    assert len(jobs(ended(driven, job))) == begun
