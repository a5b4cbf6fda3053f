"""A source node makes batches of what reaches it while its device is busy."""

from __future__ import annotations

import pytest

from asyncspec.core.jobs import DraftBatch
from asyncspec.core.machine import Abandon, Compute, Computed, Received, Send
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import DRAFT
from asyncspec_protocol.messages import Close, Expand, Withdraw
from nodes.machine_driver import Driven, forgotten
from nodes.test_source import answer, asked, expand, source


def busy() -> tuple[Driven, Expand, list[Expand]]:
    """The device works on a expand; two more wait."""
    driven = source()
    first = expand(0, (1,))
    asked(driven, first)
    waiting = [expand(0, (2, 3), session) for session in (1, 2)]
    for job in waiting:
        assert driven.feed(Received(DRAFT, job)) == []
    return driven, first, waiting


def test_waiting_requests_are_one_batch_when_the_device_is_free() -> None:
    driven, first, waiting = busy()
    sent, compute = driven.feed(Computed(first, answer(first), 0.5))
    assert isinstance(sent, Send)
    batch = DraftBatch(tuple(waiting))
    assert compute == Compute(batch)
    third = expand(1, (4,))
    assert driven.feed(Received(DRAFT, third)) == []
    found = driven.feed(Computed(batch, tuple(map(answer, waiting)), 0.5))
    answered = [e.message for e in found if isinstance(e, Send)]
    assert [(message.session, message.seconds) for message in answered] == [(1, 0.25), (2, 0.25)]
    assert found[-1] == Compute(third), "who is alone is asked alone"


def test_a_request_withdrawn_early_only_reads_its_tokens() -> None:
    driven, first, (one, other) = busy()
    assert driven.feed(Received(DRAFT, Withdraw(1))) == []
    *_, compute = driven.feed(Computed(first, answer(first)))
    assert isinstance(compute, Compute)
    short, whole = compute.job.jobs  # type: ignore[union-attr]
    assert (short.committed, short.count, short.depth) == (one.committed, 0, 0)
    assert whole is other
    found = driven.feed(Computed(compute.job, (answer(short), answer(whole))))
    assert [type(effect) for effect in found] == [Send, Send]
    driven.feed(Received(DRAFT, expand(2, (4,), 1)))


def test_one_of_a_batch_is_withdrawn_at_the_device() -> None:
    driven, first, (one, other) = busy()
    driven.feed(Computed(first, answer(first)))
    assert driven.feed(Received(DRAFT, Withdraw(2))) == [Abandon(other)]
    found = driven.feed(Computed(DraftBatch((one, other)), (answer(one), answer(other))))
    assert [effect.message.session for effect in found if isinstance(effect, Send)] == [1, 2]


def test_a_session_that_is_closed_before_its_turn_is_asked_nothing() -> None:
    driven, first, (_, other) = busy()
    assert driven.feed(Received(DRAFT, Close(1))) == forgotten(1)
    assert driven.feed(Computed(first, answer(first)))[-1] == Compute(other)


def test_a_session_that_is_closed_at_the_device_leaves_the_batch_to_the_others() -> None:
    driven, first, (one, other) = busy()
    driven.feed(Computed(first, answer(first)))
    assert driven.feed(Received(DRAFT, Close(1))) == [Abandon(one), *forgotten(1)]
    found = driven.feed(Computed(DraftBatch((one, other)), (answer(one), answer(other))))
    assert [effect.message.session for effect in found if isinstance(effect, Send)] == [2]


def test_a_session_has_one_draft_request_at_a_time_also_while_it_waits() -> None:
    driven, _, _ = busy()
    with pytest.raises(RemoteProtocolError, match="goes on from token"):
        driven.feed(Received(DRAFT, expand(2, (3,), 1)))
