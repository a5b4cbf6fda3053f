"""What follows a pass is known before it ends, and nothing counts until it begins."""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec.core.jobs import Batch, Compact, Forward
from asyncspec.core.machine import Abandon, Compute, LinkDown, Received, RunNext
from asyncspec_protocol.ids import DRAFT, Rank, SessionId
from asyncspec_protocol.messages import Close, Credit, Verdict
from nodes.machine_driver import (
    Driven,
    announced,
    done,
    opening,
    outcome,
    passes,
    prune,
    received,
    sent,
    stage,
)


def at_work(rank: int = 1, stages: int = 1) -> tuple[Driven, Forward]:
    """A stage that knows what passes take and has one in service: nodes 1 and 2, children of 0."""
    driven = stage(rank, stages)
    (first,) = passes(driven.feed(received(driven, 0, {0: -1})))
    driven.feed(done(first, outcome(driven, first)))
    (second,) = passes(driven.feed(received(driven, 1, {1: 0, 2: 0})))
    return driven, second


def test_a_waiting_segment_is_announced_and_runs_next() -> None:
    driven, running = at_work()
    (reported,) = [
        e for e in driven.feed(received(driven, 2, {3: 1, 4: 2})) if isinstance(e, RunNext)
    ]
    assert reported.after is running
    assert isinstance(reported.job, Forward)
    assert reported.job.segment == 2
    effects = driven.feed(done(running, outcome(driven, running)))
    assert [e.job for e in effects if isinstance(e, Compute)] == [reported.job]
    assert next(e.job for e in effects if isinstance(e, Compute)) is reported.job
    assert driven.state.next_pass is None
    assert not announced(effects)


def test_rows_that_die_meanwhile_are_not_in_it() -> None:
    driven, running = at_work()
    driven.feed(received(driven, 2, {3: 1, 4: 2}))
    # Node 1 is accepted: 2 dies, and 4 with it. The cache is compacted before the next pass.
    effects = driven.feed(prune(1, 5, (1,), (3,)))
    assert [type(e.job) for e in effects if isinstance(e, Compute)] == [Compact]
    (job,) = announced(effects)
    assert isinstance(job, Forward)
    assert job.tokens == (3,)
    effects = driven.feed(done(running, outcome(driven, running)))
    assert passes(effects) == [job]
    (verdict,) = sent(driven.feed(done(job, outcome(driven, job))), Verdict)
    assert verdict.ids == (3,)


def test_no_pass_is_announced_when_all_its_rows_died() -> None:
    driven, running = at_work()
    driven.feed(received(driven, 2, {4: 2}))
    effects = driven.feed(prune(1, 5, (1,), ()))
    assert announced(effects) == [None]
    assert not [e for e in effects if isinstance(e, Abandon)]
    assert not passes(driven.feed(done(running, outcome(driven, running))))


def test_no_pass_is_announced_for_a_session_that_is_over() -> None:
    driven, running = at_work()
    driven.feed(received(driven, 2, {3: 1}))
    assert announced(driven.feed(Received(DRAFT, Close(SessionId(0))))) == [None]
    assert not passes(driven.feed(done(running, outcome(driven, running))))


def test_other_sessions_join_it() -> None:
    driven, running = at_work()
    driven.feed(received(driven, 2, {3: 1}))
    driven.feed(Received(DRAFT, opening(1, session=1)))
    (job,) = announced(driven.feed(received(driven, 0, {0: -1}, session=1)))
    assert isinstance(job, Batch)
    assert [one.session for one in job.passes] == [0, 1]
    effects = driven.feed(done(running, outcome(driven, running)))
    assert [e.job for e in effects if isinstance(e, Compute)] == [job]


def test_no_pass_is_announced_without_credit_for_the_one_in_service() -> None:
    driven, running = at_work(1, 2)
    driven.state = replace(driven.state, allowed=driven.state.sent)
    assert not announced(driven.feed(received(driven, 2, {3: 1})))
    # Room for what is in service is enough; what follows may wait for its own.
    limit = driven.state.sent + 1
    (job,) = announced(driven.feed(Received(Rank(2), Credit(limit))))
    assert isinstance(job, Forward)
    effects = driven.feed(done(running, outcome(driven, running)))
    assert passes(effects) == [job]


def test_no_pass_is_announced_once_the_next_stage_is_gone() -> None:
    driven, _ = at_work(1, 2)
    driven.feed(received(driven, 2, {3: 1}))
    assert announced(driven.feed(LinkDown(Rank(2)))) == [None]


def test_turns_of_an_announced_pass_count_from_its_start() -> None:
    """The first stage numbers a session's turns; one that is given up does not count."""
    for given_up in (False, True):
        driven, running = at_work()
        driven.feed(received(driven, 2, {3: 0, 4: 0}))
        if given_up:
            effects = driven.feed(prune(1, 5, (), (3, 4)))
            assert [e.job for e in effects if isinstance(e, Abandon)] == [running]
        (job,) = passes(driven.feed(done(running, outcome(driven, running))))
        (verdict,) = sent(driven.feed(done(job, outcome(driven, job))), Verdict)
        assert verdict.pass_number == (2 if given_up else 3)
