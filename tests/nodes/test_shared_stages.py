"""A stage that several draft nodes share: an account for each, and nobody touches another's."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from asyncspec.core.jobs import Admit, Batch, Release
from asyncspec.core.kv_slots import BLOCK
from asyncspec.core.machine import Compute, Effect, Input, LinkDown, LinkUp, Received, Send
from asyncspec_nodes.roles.verify.config import VerifyConfig
from asyncspec_nodes.roles.verify.lifecycle import EARLIER_SHARE_SECONDS
from asyncspec_nodes.roles.verify.machine import VerifyMachine
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import (
    DRAFT,
    NodeId,
    Rank,
    SessionId,
    Version,
    draft_rank,
    first_session,
    owner,
)
from asyncspec_protocol.messages import (
    Close,
    Credit,
    Fault,
    Message,
    PassTimes,
    PruneIndices,
    Ready,
    Segment,
    Verdict,
)
from nodes.machine_driver import Driven, done, draft, opening, passes, segment, sent, stage

OTHER = draft_rank(7)
THEIRS = first_session(OTHER)


def shared(rank: int = 1, stages: int = 1, window: int = 8) -> Driven:
    """A stage with session 0 of draft node 0 and the first session of another."""
    driven = stage(rank, stages, window=window)
    driven.feed(LinkUp(OTHER))
    before = OTHER if rank == 1 else Rank(rank - 1)
    driven.feed(Received(before, opening(1, THEIRS)))
    return driven


def own(number: int, nodes: dict[int, int], more: int = 0) -> Received:
    return Received(DRAFT, replace(segment(number, nodes), batch_remaining=more))


def theirs(number: int, nodes: dict[int, int], more: int = 0) -> Received:
    return Received(OTHER, replace(segment(number, nodes, session=THEIRS), batch_remaining=more))


def pruning(session: SessionId, horizon: int, *accepted: int) -> PruneIndices:
    return PruneIndices(session, Version(1), NodeId(horizon), tuple(map(NodeId, accepted)), ())


def sessions(effects: list[Effect]) -> list[SessionId]:
    """Of the passes that were started."""
    jobs = [e.job for e in effects if isinstance(e, Compute)]
    together = [one.session for job in jobs if isinstance(job, Batch) for one in job.passes]
    return together + [one.session for one in passes(effects)]


def test_sessions_of_several_draft_nodes_share_a_pass_and_each_hears_of_its_own() -> None:
    only = shared()
    only.feed(Received(DRAFT, opening(1, session=1)))
    (first,) = passes(only.feed(own(0, {0: -1})))
    only.feed(theirs(0, {0: -1}), own(1, {1: 0}))
    only.feed(Received(DRAFT, segment(0, {0: -1}, session=1)))
    effects = only.feed(done(first, (5,)))
    assert sessions(effects) == [THEIRS, 0, 1]
    job = only.state.running.job
    verdicts = [
        (e.to, e.message.session, e.message.batch_remaining)
        for e in only.feed(done(job, ((5,), (6,), (7,))))
        if isinstance(e, Send) and isinstance(e.message, Verdict)
    ]
    assert verdicts == [(OTHER, THEIRS, 0), (DRAFT, 0, 1), (DRAFT, 1, 0)]


def test_each_has_credit_of_its_own() -> None:
    only = shared(window=2)
    only.feed(own(0, {0: -1}), own(1, {1: 0}), own(2, {2: 1}))
    with pytest.raises(RemoteProtocolError, match="without credit") as caught:
        only.feed(own(3, {3: 2}))
    assert caught.value.peer == DRAFT
    # The queue is full of the one's; the other has all of its places.
    effects = only.feed(theirs(0, {0: -1}), theirs(1, {1: 0}))
    assert sent(effects, Credit) == []
    assert [w.session for w in only.state.queue] == [0, 0, THEIRS, THEIRS]


def test_no_draft_node_waits_for_segments_another_has_announced() -> None:
    only = shared()
    assert sessions(only.feed(theirs(0, {0: -1}, more=1))) == []
    for number in range(3):
        effects = only.feed(own(number, {number: number - 1}))
        assert sessions(effects) == [0]
        effects = only.feed(done(passes(effects)[0], (5,)))
        assert sessions(effects) == []
    assert [(w.session, w.passed_over) for w in only.state.queue] == [(THEIRS, 0)]
    assert sessions(only.feed(theirs(1, {1: 0}))) == [THEIRS]


def test_more_cannot_be_announced_than_may_be_sent() -> None:
    only = shared(window=2)
    with pytest.raises(RemoteProtocolError, match="more segments announced") as caught:
        only.feed(theirs(0, {0: -1}, more=2))
    assert caught.value.peer == OTHER


def test_losing_one_ends_its_sessions_alone() -> None:
    middle = shared(1, 2)
    (job,) = passes(middle.feed(theirs(0, {0: -1})))
    middle.feed(own(0, {0: -1}), theirs(1, {1: 0}))
    effects = middle.feed(LinkDown(OTHER))
    released = [e.job for e in effects if isinstance(e, Compute) and isinstance(e.job, Release)]
    assert released == [Release(THEIRS)]
    assert sent(effects, Ready) == []
    assert set(middle.state.sessions) == {0}
    # Its pass comes to its end and brings nothing; the other's turn is next.
    effects = middle.feed(done(job, object()))
    assert sent(effects, Segment) == []
    assert sessions(effects) == [0]
    granted = middle.feed(LinkUp(OTHER))
    assert Send(OTHER, Credit(8, 8)) in granted
    assert Send(OTHER, Ready(Rank(1), True, 0, THEIRS, SessionId(0))) in granted


def test_all_draft_nodes_receive_the_next_stage_and_pass_times() -> None:
    first = shared(1, 2)
    effects = first.feed(LinkDown(Rank(2)))
    for rank, opened in ((DRAFT, SessionId(0)), (OTHER, THEIRS)):
        assert Send(rank, Ready(Rank(1), False, 0, opened, SessionId(0))) in effects
    assert not first.state.sessions
    only, reported = shared(), []
    for number in range(9):
        effects = only.feed(theirs(number, {number: number - 1}))
        reported += [e for e in only.feed(done(passes(effects)[0], (5,))) if isinstance(e, Send)]
    assert {e.to for e in reported if isinstance(e.message, PassTimes)} == {DRAFT, OTHER}


def test_nothing_is_opened_for_a_draft_node_that_is_gone() -> None:
    """Nobody would ever close it here; and what comes of it is known to be over."""
    last = shared(2, 2)
    last.feed(LinkDown(OTHER))
    late = segment(0, {0: -1}, tokens=False, session=THEIRS + 1)
    effects = last.feed(
        Received(Rank(1), opening(1, THEIRS + 1)), Received(Rank(1), late, object())
    )
    assert [e for e in effects if isinstance(e, Compute) and isinstance(e.job, Admit)] == []
    assert set(last.state.sessions) == {0}


def test_inconsistent_messages_end_the_session_and_no_link_between_stages() -> None:
    last = shared(2, 2)
    first = segment(0, {0: -1, 1: 0}, tokens=False, session=THEIRS)
    (job,) = passes(last.feed(Received(Rank(1), first, object())))
    last.feed(done(job, (1, 2)))
    # The first stage was not told that node 1 is dead, and sends on its child.
    last.feed(Received(OTHER, pruning(THEIRS, 2)))
    child = segment(1, {2: 1}, tokens=False, session=THEIRS)
    effects = last.feed(Received(Rank(1), child, object()))
    (fault,) = [e for e in effects if isinstance(e, Send) and isinstance(e.message, Fault)]
    assert fault.to == OTHER
    assert "node 2" in fault.message.text  # type: ignore[union-attr]
    assert "does not follow its parent 1" in fault.message.text  # type: ignore[union-attr]
    assert set(last.state.sessions) == {0}
    assert last.state.inbound[Rank(1)].received == 2
    ours: Input = Received(Rank(1), segment(0, {0: -1}, tokens=False), object())
    assert sessions(last.feed(ours)) == [0]


def test_a_prefix_that_only_the_first_stage_has_opens_no_session_behind_it() -> None:
    last = shared(2, 2)
    begun = replace(opening(3, THEIRS + 1), parent_session=THEIRS, common_prefix=2)
    effects = last.feed(Received(Rank(1), begun))
    assert [e.to for e in effects if isinstance(e, Send) and isinstance(e.message, Fault)] == [
        OTHER
    ]
    assert set(last.state.sessions) == {0, THEIRS}
    # What comes of it is known to be over.
    late = segment(0, {2: 1}, tokens=False, session=THEIRS + 1)
    assert sessions(last.feed(Received(Rank(1), late, object()))) == []


def test_prompts_are_kept_while_their_draft_node_is_there() -> None:
    only = shared()
    for kind, session, rank in ((own, 0, DRAFT), (theirs, THEIRS, OTHER)):
        (job,) = passes(only.feed(kind(0, {0: -1})))
        only.feed(done(job, (5,)))
        only.feed(Received(rank, Close(SessionId(session), keep=True)))
    assert only.state.cached_prompts == {0: 1, THEIRS: 1}
    effects = only.feed(LinkDown(OTHER))
    assert Compute(Release(THEIRS)) in effects
    assert only.state.cached_prompts == {0: 1}


def test_each_may_count_on_its_share_of_the_cache() -> None:
    only = Driven(VerifyMachine(VerifyConfig(Rank(1), 1, slots=900)))
    shares = [
        [(e.to, e.message.slots) for e in effects if isinstance(e, Send) and is_ready(e.message)]
        for effects in (
            only.feed(LinkUp(DRAFT)),
            only.feed(LinkUp(OTHER)),
            only.feed(LinkDown(DRAFT)),
        )
    ]
    assert shares == [[(DRAFT, 900)], [(DRAFT, 450), (OTHER, 450)], [(OTHER, 900)]]


def opened(driven: Driven, rank: Rank, blocks: int) -> list[int]:
    """How many blocks each draft node has, after a session of so many."""
    name = SessionId(max(first_session(rank), driven.state.marks(rank).opened + 1))
    message = replace(opening(1, name), capacity=blocks * BLOCK, max_tree_nodes=0)
    driven.feed(Received(rank, message))
    held = Counter[Rank]()
    for session, one in driven.state.sessions.items():
        held[owner(session)] += one.max_slots // BLOCK
    return [held[DRAFT], held[OTHER]]


def two_on(slots: int) -> Driven:
    """A stage with so many slots for two draft nodes, which have had time to hear of it."""
    only = Driven(VerifyMachine(VerifyConfig(Rank(1), 1, slots=slots)))
    only.feed(LinkUp(DRAFT), LinkUp(OTHER))
    only.now += EARLIER_SHARE_SECONDS
    return only


@pytest.mark.parametrize("first", [DRAFT, OTHER])
def test_none_takes_more_than_its_share_of_the_cache(first: Rank) -> None:
    only = two_on(900)
    second = OTHER if first == DRAFT else DRAFT
    opened(only, first, 6)
    with pytest.raises(RemoteProtocolError, match="of 450 there are 66 left") as caught:
        opened(only, first, 2)
    assert caught.value.peer == first
    opened(only, first, 1)
    assert opened(only, second, 7) == [7, 7]
    for rank in (DRAFT, OTHER):
        with pytest.raises(RemoteProtocolError, match="of 450 there are 2 left"):
            opened(only, rank, 1)


def test_what_was_sent_by_an_earlier_share_is_taken() -> None:
    """An ``Open`` and the ``Ready`` of a smaller share may meet; what was opened stays."""
    only = Driven(VerifyMachine(VerifyConfig(Rank(1), 1, slots=900)))
    only.feed(LinkUp(DRAFT))
    assert opened(only, DRAFT, 5) == [5, 0]
    only.feed(LinkUp(OTHER))
    # Which was never told of more.
    with pytest.raises(RemoteProtocolError, match="of 450 there are 450 left"):
        opened(only, OTHER, 8)
    assert opened(only, DRAFT, 7) == [12, 0]
    assert opened(only, OTHER, 7) == [12, 7]
    only.now += EARLIER_SHARE_SECONDS
    with pytest.raises(RemoteProtocolError, match="of 450 there are 0 left"):
        opened(only, DRAFT, 1)
    only.feed(LinkDown(OTHER))
    assert opened(only, DRAFT, 2) == [14, 0]


def test_a_share_that_shrinks_again_and_again_was_no_larger_before() -> None:
    """Nor does a draft node that comes back count on more than it was told."""
    only = two_on(900)
    third = draft_rank(2)
    for _ in range(3):
        only.feed(LinkUp(third))
        with pytest.raises(RemoteProtocolError, match="of 450 there are 450 left"):
            opened(only, DRAFT, 8)
        only.feed(LinkDown(OTHER), LinkUp(OTHER), LinkDown(third))
    only.feed(LinkUp(third))
    only.now += EARLIER_SHARE_SECONDS
    with pytest.raises(RemoteProtocolError, match="of 300 there are 300 left"):
        opened(only, DRAFT, 5)


def is_ready(message: Message) -> bool:
    return isinstance(message, Ready) and message.up


def test_another_share_is_no_other_pipeline() -> None:
    """Else the prompts that the stages keep would be forgotten at every coming and going."""
    node = draft()
    assert node.feed(Received(Rank(1), Ready(Rank(1), True, 450))) == []
    assert node.state.slots == {1: 450}
    assert node.state.up


@pytest.mark.parametrize("accepted", [(), (2,)])
def test_a_prune_must_not_leave_what_waits_without_its_parent(accepted: tuple[int, ...]) -> None:
    """The stage would find no place for it."""
    only = shared()
    (job,) = passes(only.feed(theirs(0, {0: -1, 1: 0, 2: 0})))
    only.feed(done(job, (5, 5, 5)))
    only.feed(own(0, {0: -1}))
    only.feed(theirs(1, {3: 1}))
    before = only.state
    with pytest.raises(RemoteProtocolError, match=r"node 3 .* its parent 1") as caught:
        only.feed(Received(OTHER, pruning(THEIRS, 3, *accepted)))
    assert caught.value.peer == OTHER
    assert only.state is before
