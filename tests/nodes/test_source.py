"""A token source on a node of its own."""

from __future__ import annotations

from typing import Any

import pytest

from asyncspec.core.jobs import DraftBatch, Feed, TensorRows
from asyncspec.core.machine import (
    Abandon,
    Compute,
    Computed,
    LinkDown,
    LinkUp,
    Received,
    Send,
    TimerFired,
)
from asyncspec_nodes.roles.source import SourceConfig, SourceMachine
from asyncspec_protocol.errors import LocalProtocolError, RemoteProtocolError
from asyncspec_protocol.ids import DRAFT, Rank, draft_rank, first_session
from asyncspec_protocol.messages import (
    Close,
    Credit,
    Expand,
    Expanded,
    Features,
    Floor,
    Ready,
    Withdraw,
)
from nodes.machine_driver import Driven, abandoned, forgotten

RANK = Rank(3)


def source() -> Driven:
    driven = Driven(SourceMachine(SourceConfig(RANK, vocab=10)))
    driven.feed(LinkUp(DRAFT))
    return driven


def expand(base: int, committed: tuple[int, ...], session: int = 0, **fields: Any) -> Expand:
    return Expand(session, 0, base, committed, **{"depth": 2, "width": 2, "count": 4, **fields})


def asked(driven: Driven, job: Expand) -> None:
    (effect,) = driven.feed(Received(DRAFT, job))
    assert effect == Compute(job)


def answer(job: Expand) -> Expanded:
    return Expanded(job.session, job.version, job.base + len(job.committed), (-1,), (1,), (-0.5,))


def test_a_draft_request_is_computed_and_answered_with_its_time() -> None:
    driven = source()
    first = expand(0, (1, 2, 3))
    asked(driven, first)
    (sent,) = driven.feed(Computed(first, answer(first), 0.25))
    assert sent == Send(DRAFT, Expanded(0, 0, 3, (-1,), (1,), (-0.5,), 0.25))
    asked(driven, expand(3, (4,)))


def test_draft_requests_must_continue_one_another() -> None:
    driven = source()
    asked(driven, expand(0, (1, 2)))
    for job in (expand(2, (3,)), expand(0, (1,))):
        with pytest.raises(RemoteProtocolError, match="goes on from token"):
            driven.feed(Received(DRAFT, job))
    other = source()
    with pytest.raises(RemoteProtocolError, match="goes on from token 5, not 0"):
        other.feed(Received(DRAFT, expand(5, (1,))))


def test_tokens_the_target_does_not_have() -> None:
    known = {"parents": (-1,), "tokens": (10,), "scores": (-1.0,), "frontier": (0,)}
    for job in (expand(0, (10,)), expand(0, (1,), **known)):
        with pytest.raises(RemoteProtocolError, match="not in the vocabulary"):
            source().feed(Received(DRAFT, job))


def test_a_withdrawn_request_is_abandoned_and_still_answered() -> None:
    driven = source()
    job = expand(0, (1,))
    asked(driven, job)
    assert abandoned(driven.feed(Received(DRAFT, Withdraw(0)))) == [job]
    assert [type(e) for e in driven.feed(Computed(job, answer(job)))] == [Send]
    assert driven.feed(Received(DRAFT, Withdraw(0)), Received(DRAFT, Withdraw(7))) == []


@pytest.mark.parametrize(
    "end", [Received(DRAFT, Close(0)), Received(DRAFT, Floor(5)), LinkDown(DRAFT)]
)
def test_the_end_of_a_session(end: Any) -> None:
    driven = source()
    job = expand(0, (1,))
    asked(driven, job)
    assert driven.feed(end) == [Abandon(job), *forgotten(0)]
    assert driven.feed(Computed(job, answer(job))) == []
    assert driven.state.sessions == {}
    assert driven.feed(end) == []


def test_a_draft_request_of_a_session_that_is_over() -> None:
    driven = source()
    driven.feed(Received(DRAFT, Floor(5)))
    assert driven.feed(Received(DRAFT, expand(7, (1,), session=4))) == []


def test_messages_that_are_not_for_a_token_source() -> None:
    driven = source()
    for peer, message in ((DRAFT, Credit(1)), (Rank(1), Withdraw(0))):
        with pytest.raises(RemoteProtocolError, match="unexpected"):
            driven.feed(Received(peer, message))
    with pytest.raises(LocalProtocolError, match="no use for TimerFired"):
        driven.feed(TimerFired("late"))


OTHER = draft_rank(5)
THEIRS = first_session(OTHER)


def test_two_draft_nodes_have_one_device() -> None:
    driven = source()
    driven.feed(LinkUp(OTHER))
    first, theirs, third = (
        expand(0, (1,)),
        expand(0, (2,), THEIRS),
        expand(0, (3,), 1),
    )
    asked(driven, first)
    assert driven.feed(Received(OTHER, theirs), Received(DRAFT, third)) == []
    *_, compute = driven.feed(Computed(first, answer(first)))
    batch = DraftBatch((theirs, third))
    assert compute == Compute(batch)
    found = driven.feed(Computed(batch, (answer(theirs), answer(third)), 0.5))
    assert [(e.to, e.message.session) for e in found if isinstance(e, Send)] == [
        (OTHER, THEIRS),
        (DRAFT, 1),
    ]


@pytest.mark.parametrize("end", [LinkDown(OTHER), Received(OTHER, Floor(THEIRS + 9))])
def test_the_end_of_one_draft_node_is_not_anothers(end: Any) -> None:
    driven = source()
    driven.feed(LinkUp(OTHER))
    job, theirs = expand(0, (1,)), expand(0, (2,), THEIRS)
    asked(driven, job)
    driven.feed(Received(OTHER, theirs))
    assert driven.feed(end) == forgotten(THEIRS)
    assert [type(e) for e in driven.feed(Computed(job, answer(job)))] == [Send]
    asked(driven, expand(1, (4,)))


def test_a_draft_node_has_no_more_sessions_here_than_it_may_have_at_a_time() -> None:
    driven = Driven(SourceMachine(SourceConfig(RANK, vocab=10, sessions=2)))
    driven.feed(LinkUp(DRAFT), LinkUp(OTHER))
    asked(driven, expand(0, (1,)))
    driven.feed(Received(DRAFT, expand(0, (1,), 1)), Received(OTHER, expand(0, (1,), THEIRS)))
    with pytest.raises(RemoteProtocolError, match="more than 2 sessions at a time"):
        driven.feed(Received(DRAFT, expand(0, (1,), 2)))
    driven.feed(Received(DRAFT, Close(1)), Received(DRAFT, expand(0, (1,), 2)))
    assert len(driven.state.sessions) == 3


def featured() -> Driven:
    driven = Driven(SourceMachine(SourceConfig(RANK, vocab=10, sessions=1, features=(2, 4))))
    (ready,) = driven.feed(LinkUp(DRAFT))
    assert ready == Send(DRAFT, Ready(RANK, True, features=(2, 4)))
    return driven


def test_features_are_fed_with_the_request_that_they_come_for() -> None:
    driven = featured()
    for start, count in ((0, 2), (2, 1)):
        handle = "x" * count
        assert driven.feed(Received(DRAFT, Features(0, start, count), handle)) == []
    first = expand(0, (1, 2, 3, 4))
    fed = Feed(0, 0, (TensorRows("xx", (0, 1)), TensorRows("x", (0,))))  # type: ignore[arg-type]
    assert driven.feed(Received(DRAFT, first)) == [Compute(fed), Compute(first)]
    # What comes while it works is for the next one.
    assert driven.feed(Received(DRAFT, Features(0, 3, 1), "y")) == []
    driven.feed(Computed(first, answer(first), 0.25))
    then = expand(4, (5,))
    fed = Feed(0, 3, (TensorRows("y", (0,)),))  # type: ignore[arg-type]
    assert driven.feed(Received(DRAFT, then)) == [Compute(fed), Compute(then)]


def test_features_that_cannot_be() -> None:
    for features, handle in ((Features(0, 1, 1), "x"), (Features(0, 0, 0), None)):
        with pytest.raises(RemoteProtocolError, match="features of session 0"):
            featured().feed(Received(DRAFT, features, handle))
    with pytest.raises(RemoteProtocolError, match="features of session 0"):
        source().feed(Received(DRAFT, Features(0, 0, 1), "x"))
    driven = featured()
    driven.feed(Received(DRAFT, Features(0, 0, 1), "x"))
    with pytest.raises(RemoteProtocolError, match="has features of 1 tokens, not 2"):
        driven.feed(Received(DRAFT, expand(0, (1, 2, 3))))
    with pytest.raises(RemoteProtocolError, match="more than 1 sessions"):
        driven.feed(Received(DRAFT, Features(1, 0, 1), "x"))


def test_features_of_a_session_that_is_over() -> None:
    driven = featured()
    driven.feed(Received(DRAFT, Features(0, 0, 1), "x"))
    assert driven.feed(Received(DRAFT, Floor(1))) == forgotten(0)
    assert driven.feed(Received(DRAFT, Features(0, 1, 1), "x")) == []
    assert not driven.state.sessions


def test_sessions_for_which_there_is_no_memory_cost_a_draft_node_its_link() -> None:
    """It admits none. Another one's count for themselves, and what has ended not at all."""
    driven = Driven(SourceMachine(SourceConfig(RANK, vocab=10, slots=5)))
    other = draft_rank(1)
    for peer in (DRAFT, other):
        driven.feed(LinkUp(peer))
    driven.feed(Received(DRAFT, expand(0, (1, 2, 3))))
    driven.feed(Received(other, expand(0, (1, 2, 3), session=first_session(other))))
    with pytest.raises(RemoteProtocolError, match="have 5 slots, and 6 are asked for"):
        driven.feed(Received(DRAFT, expand(0, (1, 2, 3), session=1)))
    driven.feed(Received(DRAFT, Close(0)))
    driven.feed(Received(DRAFT, expand(0, (1, 2, 3), session=1)))


def test_features_for_which_there_is_no_memory_cost_a_draft_node_its_link() -> None:
    """Those of a session that never asks for anything count too."""
    driven = Driven(SourceMachine(SourceConfig(RANK, vocab=10, slots=5, features=(2, 4))))
    driven.feed(LinkUp(DRAFT))
    driven.feed(Received(DRAFT, Features(0, 0, 3), "x"))
    with pytest.raises(RemoteProtocolError, match="have 5 slots, and 6 are asked for"):
        driven.feed(Received(DRAFT, Features(0, 3, 3), "x"))
    with pytest.raises(RemoteProtocolError, match="have 5 slots, and 6 are asked for"):
        driven.feed(Received(DRAFT, Features(1, 0, 3), "x"))
    driven.feed(Received(DRAFT, Features(0, 3, 2), "x"))
