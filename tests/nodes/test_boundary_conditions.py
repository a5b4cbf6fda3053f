"""Order and bounds of the machines, one step beyond each: the machines by hand."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from asyncspec.core.jobs import Admit, Compact, Forward, Release, Trim
from asyncspec.core.machine import (
    Cancelled,
    Compute,
    Effect,
    Emit,
    Finish,
    LinkDown,
    LinkUp,
    Received,
    Send,
    SendClosed,
    Stopped,
    Submitted,
)
from asyncspec_nodes.roles.verify.config import VerifyConfig
from asyncspec_nodes.roles.verify.machine import VerifyMachine
from asyncspec_protocol.errors import LocalProtocolError, RemoteProtocolError
from asyncspec_protocol.ids import DRAFT, Rank, SessionId
from asyncspec_protocol.messages import (
    Close,
    Closed,
    Credit,
    Expand,
    Expanded,
    Fault,
    Message,
    Open,
    PassTimes,
    PruneIndices,
    Rates,
    Ready,
    Segment,
    Verdict,
)
from cluster import ask
from nodes.machine_driver import Driven, done, draft, opening, passes, prune, segment, sent, stage

V1, V2 = Rank(1), Rank(2)


def verdict(number: int, tokens: dict[int, int], session: int = 0, applied: int = 0) -> Received:
    ids, said = tuple(tokens), tuple(tokens.values())
    return Received(V1, Verdict(SessionId(session), number, applied, ids, said))  # type: ignore[arg-type]


def grown(driven: Driven, effects: list[Effect], tree: dict[int, int]) -> list[Effect]:
    """Answer a source on a node of its own: candidate -> parent, tokens 10, 11 and so on."""
    (job,) = sent(effects, Expand)
    tokens = tuple(10 + i for i in tree)
    scores = tuple(-0.1 * (i + 1) for i in tree)
    base = job.base + len(job.committed)
    answer = Expanded(job.session, job.version, base, tuple(tree.values()), tokens, scores)
    return driven.feed(Received(V2, answer))


def speculating(credit: int = 100) -> tuple[Driven, list[Effect]]:
    """A session whose first token is 5 (node 1), with nodes 2 and 3 below it, and 4 below 2."""
    driven = draft(credit=credit, source=V2)
    driven.feed(LinkUp(V2))
    effects = driven.feed(Submitted(ask(0, prompt=(1,), policy="pruned")))
    grown(driven, effects, {})
    effects = driven.feed(verdict(0, {0: 5}))
    return driven, effects + grown(driven, effects, {0: -1, 1: -1, 2: 0})


def kinds(effects: list[Effect], to: Rank = V1) -> list[type[Message]]:
    """The types of what is sent to a stage, in order."""
    return [type(e.message) for e in effects if isinstance(e, Send) and e.to == to]


# --- order of control and data ----------------------------------------------------------------


def test_a_session_is_opened_before_its_first_segment() -> None:
    effects = draft().feed(Submitted(ask(0, policy="autoregressive")))
    assert kinds(effects) == [Open, Segment]


def test_a_prune_goes_before_what_is_sent_below_it() -> None:
    driven = draft(stages=1)
    driven.feed(Submitted(ask(0, prompt=(1,), policy="autoregressive")))
    assert kinds(driven.feed(verdict(0, {0: 5}))) == [PruneIndices, Segment]


def test_a_close_goes_before_what_takes_its_place() -> None:
    driven = draft(stages=1)
    driven.feed(*(Submitted(ask(n, prompt=(n,), policy="autoregressive")) for n in range(5)))
    assert kinds(driven.feed(Cancelled(0))) == [Close, Open, Segment]


def test_the_cache_is_compacted_before_the_pass_that_counts_on_it() -> None:
    only = stage()
    (job,) = passes(only.feed(Received(DRAFT, segment(0, {0: -1, 1: 0, 2: 0}))))
    only.feed(done(job, (9, 9, 9)))
    (job,) = passes(only.feed(Received(DRAFT, segment(1, {3: 1}))))
    only.feed(Received(DRAFT, segment(2, {4: 2})))
    # Node 1 and all below it dies during its pass: the next pass finds its slots free.
    effects = only.feed(prune(1, 5, (2,), (4,)))
    effects += only.feed(done(job, ()))
    jobs = [type(e.job) for e in effects if isinstance(e, Compute)]
    assert jobs == [Compact, Forward]


def test_a_prune_that_lets_a_pass_begin_compacts_first() -> None:
    """The row that waited for credit dies, and with it what kept the device idle."""
    first = stage(1, 2)
    first.feed(LinkDown(V2), LinkUp(V2), Received(V2, Credit(1)))
    first.feed(Received(DRAFT, opening(1, session=1)))
    (job,) = passes(first.feed(Received(DRAFT, segment(0, {0: -1, 1: 0, 2: 0}, session=1))))
    first.feed(done(job, object()))
    (job,) = passes(first.feed(Received(DRAFT, segment(1, {3: 2}, session=1))))
    first.feed(done(job, object()), Received(DRAFT, segment(2, {4: 1}, session=1)))
    assert [w.ids for w in first.state.outbox] == [(3,)]
    dead = PruneIndices(SessionId(1), 1, 5, (1,), (4,))  # type: ignore[arg-type]
    jobs = [e.job for e in first.feed(Received(DRAFT, dead)) if isinstance(e, Compute)]
    assert [type(job) for job in jobs] == [Compact, Forward]


def test_segments_of_a_link_wait_in_the_order_in_which_they_came() -> None:
    only = stage()
    only.feed(*(Received(DRAFT, segment(n, {n: n - 1})) for n in range(4)))
    assert [w.segment for w in only.state.queue] == [1, 2, 3]


def test_an_admission_goes_before_the_first_pass() -> None:
    only = stage()
    effects = only.feed(Received(DRAFT, opening(1, session=1)))
    effects += only.feed(Received(DRAFT, segment(0, {0: -1}, session=1)))
    jobs = [type(e.job) for e in effects if isinstance(e, Compute)]
    assert jobs == [Admit, Forward]


# --- what every stage hears ---------------------------------------------------------------------


def test_every_stage_hears_of_every_prune_and_every_end() -> None:
    driven = draft(stages=3)
    driven.feed(Submitted(ask(0, prompt=(1,), max_new_tokens=2, policy="autoregressive")))
    said = Verdict(SessionId(0), 0, 0, (0,), (5,))  # type: ignore[arg-type]
    effects = driven.feed(Received(Rank(3), said))
    assert [e.to for e in effects if is_sent(e, PruneIndices)] == [1, 2, 3]
    said = Verdict(SessionId(0), 1, 1, (1,), (6,))  # type: ignore[arg-type]
    effects = driven.feed(Received(Rank(3), said))
    assert [e.to for e in effects if is_sent(e, Close)] == [1, 2, 3]


def is_sent(effect: Any, kind: type[Message]) -> bool:
    return isinstance(effect, Send) and isinstance(effect.message, kind)


def test_what_waits_for_credit_is_kept_by_a_prune() -> None:
    """Else the stages would take it for dead when it comes."""
    driven, effects = speculating(credit=2)
    assert [message.ids for message in sent(effects, Segment)] == [(1, 2, 3)]
    assert driven.state.sessions[0].unsent == (4,)
    (message,) = sent(driven.feed(verdict(1, {1: 10})), PruneIndices)
    assert message.keep == (4,)


def test_only_live_nodes_are_judged_and_counted_as_sent() -> None:
    driven, _ = speculating()
    driven.feed(verdict(2, {3: 77}), verdict(1, {1: 10}))
    session = driven.state.sessions[0]
    assert session.tree.root == 2
    assert set(session.verified) == set()
    assert session.sent.keys() == {2, 4}
    # What is said of the dead comes too late.
    driven.feed(verdict(2, {3: 78}))
    assert set(driven.state.sessions[0].verified) == set()


def test_ids_are_never_used_again() -> None:
    driven, effects = speculating()
    assert [node for m in sent(effects, Segment) for node in m.ids] == [1, 2, 3, 4]
    # A miss: the new root and all that grows below it have new names.
    effects = driven.feed(verdict(1, {1: 99}))
    effects += grown(driven, effects, {0: -1})
    assert [node for m in sent(effects, Segment) for node in m.ids] == [5, 6]


# --- one step beyond ----------------------------------------------------------------------------


def test_a_stage_knows_no_session_beyond_the_last_that_was_opened() -> None:
    only = stage()
    for message in (
        segment(0, {0: -1}, session=1),
        replace(prune(1, 0, (), ()).message, session=1),
    ):
        with pytest.raises(RemoteProtocolError, match="session 1 was never opened"):
            only.feed(Received(DRAFT, message))


def test_a_draft_node_knows_no_session_beyond_the_last_that_it_opened() -> None:
    driven = draft()
    driven.feed(Submitted(ask(0, prompt=(1,))))
    with pytest.raises(RemoteProtocolError, match="session 1 was never opened"):
        driven.feed(verdict(0, {0: 5}, session=1))


def test_a_session_is_opened_once() -> None:
    only = stage()
    only.feed(Received(DRAFT, segment(0, {0: -1})))
    before = only.state.sessions[0]
    assert only.feed(Received(DRAFT, opening(1))) == []
    assert only.state.sessions[0] == before


@pytest.mark.parametrize("credit", [99, 0])
def test_credit_is_never_taken_back(credit: int) -> None:
    driven = draft(credit=100)
    with pytest.raises(RemoteProtocolError, match="credit was taken back"):
        driven.feed(Received(V1, Credit(credit)))
    driven.feed(Received(V1, Credit(100)))


def test_credit_starts_anew_with_a_link() -> None:
    driven = draft(stages=2, credit=5)
    driven.feed(Submitted(ask(0, prompt=(1,), policy="autoregressive")))
    assert (driven.state.allowed, driven.state.sent) == (5, 1)
    driven.feed(LinkDown(V1), LinkUp(V1))
    assert (driven.state.allowed, driven.state.sent) == (0, 0)
    driven.feed(Received(V1, Credit(2)))
    first = stage(1, 2)
    (job,) = passes(first.feed(Received(DRAFT, segment(0, {0: -1}))))
    first.feed(done(job, object()))
    assert (first.state.allowed, first.state.sent) == (1000, 1)
    first.feed(LinkDown(V2), LinkUp(V2))
    assert (first.state.allowed, first.state.sent) == (0, 0)


def test_no_segment_is_sent_without_credit() -> None:
    driven = draft(credit=1)
    effects = driven.feed(Submitted(ask(0, prompt=tuple(range(200)), policy="autoregressive")))
    assert len(sent(effects, Segment)) == 1
    assert len(sent(driven.feed(Received(V1, Credit(3))), Segment)) == 2


def test_credit_that_was_given_for_a_session_outlives_it() -> None:
    only = stage(window=2)
    only.feed(Received(DRAFT, opening(1, session=1)))
    (job,) = passes(only.feed(Received(DRAFT, segment(0, {0: -1}))))
    only.feed(done(job, (9,)), Received(DRAFT, opening(1, session=2)))
    granted = only.state.inbound[DRAFT].granted
    effects = only.feed(*(Received(DRAFT, Close(SessionId(n))) for n in (0, 1)))
    effects += only.feed(Received(DRAFT, segment(0, {0: -1}, session=2)))
    assert sent(effects, Credit) == []
    assert only.state.inbound[DRAFT].granted == granted


def test_a_prompt_that_is_shared_is_all_there() -> None:
    """Of a session that is open its committed slots can be taken over, and no others."""
    only = stage()
    (job,) = passes(only.feed(Received(DRAFT, segment(0, {0: -1, 1: 0, 2: 1}))))
    only.feed(done(job, (9, 9, 9)))
    assert only.state.sessions[0].slots.committed == 1
    more = replace(opening(3, session=1), parent_session=SessionId(0), common_prefix=2)
    with pytest.raises(RemoteProtocolError, match="shares 2 tokens with session 0, which has 1"):
        only.feed(Received(DRAFT, more))
    only.feed(Received(DRAFT, replace(more, common_prefix=1)))
    slots = only.state.sessions[1].slots
    assert (slots.committed, slots.tip, slots.speculative_nodes) == (1, 0, ())


def test_only_a_prompt_that_was_read_is_kept() -> None:
    only = stage(prompt_length=3)
    (job,) = passes(only.feed(Received(DRAFT, segment(0, {0: -1, 1: 0}))))
    only.feed(done(job, ()))
    effects = only.feed(Received(DRAFT, Close(SessionId(0), keep=True)))
    assert [e.job for e in effects if isinstance(e, Compute)] == [Release(SessionId(0))]
    assert only.state.cached_prompts == {}
    only.feed(Received(DRAFT, opening(2, session=1)))
    (job,) = passes(only.feed(Received(DRAFT, segment(0, {0: -1, 1: 0, 2: 1}, session=1))))
    only.feed(done(job, (9, 9)))
    effects = only.feed(Received(DRAFT, Close(SessionId(1), keep=True)))
    assert [e.job for e in effects if isinstance(e, Compute)] == [Trim(SessionId(1), 2)]
    assert only.state.cached_prompts == {1: 2}


@pytest.mark.parametrize("busy", [False, True])
def test_statistics_say_whether_the_prompt_stays(busy: bool) -> None:
    """Else the draft node would give its room to another session."""
    only = stage()
    (job,) = passes(only.feed(Received(DRAFT, segment(0, {0: -1}))))
    effects = [] if busy else only.feed(done(job, (9,)))
    effects += only.feed(Received(DRAFT, Close(SessionId(0), keep=True)))
    effects += only.feed(done(job, (9,))) if busy else []
    assert [e.kept for e in effects if isinstance(e, SendClosed)] == [True]
    effects = only.feed(Received(DRAFT, Close(SessionId(0))))
    assert [e.kept for e in effects if isinstance(e, SendClosed)] == [False]


def test_a_prompt_that_is_kept_and_closed_is_released() -> None:
    only = stage()
    (job,) = passes(only.feed(Received(DRAFT, segment(0, {0: -1}))))
    only.feed(done(job, (9,)), Received(DRAFT, Close(SessionId(0), keep=True)))
    effects = only.feed(Received(DRAFT, Close(SessionId(0))))
    assert Compute(Release(SessionId(0))) in effects
    assert only.state.cached_prompts == {}


def test_a_session_has_room_for_what_it_was_opened_for() -> None:
    """Not one node more; and what it has room for is not refused."""
    few = replace(opening(1, session=1), capacity=2, max_tree_nodes=3)
    only = stage()
    only.feed(Received(DRAFT, few))
    only.feed(Received(DRAFT, segment(0, {0: -1, 1: 0, 2: 1}, session=1)))
    only.feed(Received(DRAFT, PruneIndices(SessionId(1), 1, 3, (1, 2), ())))  # type: ignore[arg-type]
    only.feed(Received(DRAFT, segment(1, {3: 2, 4: 2}, session=1)))
    with pytest.raises(RemoteProtocolError, match="1 has 6 live nodes, and was opened for 5"):
        only.feed(Received(DRAFT, segment(2, {5: 2}, session=1)))


def test_a_tree_has_room_for_what_it_was_opened_for() -> None:
    few = replace(opening(1, session=1), max_tree_nodes=3)
    only = stage()
    only.feed(Received(DRAFT, few))
    only.feed(Received(DRAFT, segment(0, {0: -1, 1: 0, 2: 0, 3: 0}, session=1)))
    with pytest.raises(RemoteProtocolError, match=r"1 has a tree of 4 nodes, and .* for 3"):
        only.feed(Received(DRAFT, segment(1, {4: 1}, session=1)))


@pytest.mark.parametrize("slots", [127, 128])
def test_prompts_that_a_stage_keeps_take_room(slots: int) -> None:
    """A session of 64 slots fits beside one of three tokens in two blocks, and in no less."""
    only = Driven(VerifyMachine(VerifyConfig(Rank(1), 1, slots=slots)))
    first, second = (replace(opening(3, session=n), max_tree_nodes=0) for n in range(2))
    only.feed(LinkUp(DRAFT), Received(DRAFT, first))
    (job,) = passes(only.feed(Received(DRAFT, segment(0, {0: -1, 1: 0, 2: 1}))))
    only.feed(done(job, (9,)), Received(DRAFT, Close(SessionId(0), keep=True)))
    assert only.state.cached_prompts == {0: 3}
    if slots == 127:
        with pytest.raises(RemoteProtocolError, match="of 127 there are 63 left"):
            only.feed(Received(DRAFT, second))
    else:
        only.feed(Received(DRAFT, second))
        assert 1 in only.state.sessions


def test_a_later_stage_ends_an_orphan_session_and_keeps_the_link() -> None:
    last = stage(2, 2)
    wrong = segment(0, {1: 0}, tokens=False)
    effects = last.feed(Received(V1, wrong, object()))
    assert [e.to for e in effects if is_sent(e, Fault)] == [DRAFT]
    assert not last.state.sessions
    assert sent(effects, Credit, to=V1) != []


def test_a_node_that_waits_is_not_sent_again() -> None:
    only = stage()
    only.feed(Received(DRAFT, segment(0, {0: -1})), Received(DRAFT, segment(1, {1: 0})))
    with pytest.raises(RemoteProtocolError, match="does not follow"):
        only.feed(Received(DRAFT, segment(2, {1: 0})))


def test_a_source_names_tokens_of_the_vocabulary() -> None:
    driven = draft(source=V2, vocab=12)
    driven.feed(LinkUp(V2))
    effects = driven.feed(Submitted(ask(0, prompt=(1,), policy="pruned")))
    grown(driven, effects, {})
    effects = driven.feed(verdict(0, {0: 5}))
    with pytest.raises(RemoteProtocolError, match="not in the vocabulary"):
        grown(driven, effects, {0: -1, 1: -1, 2: 0})
    grown(driven, effects, {0: -1, 1: -1})


def test_a_source_answers_what_it_was_asked_and_once() -> None:
    driven = draft(source=V2)
    driven.feed(LinkUp(V2))
    (job,) = sent(driven.feed(Submitted(ask(0, prompt=(1,), policy="pruned"))), Expand)
    base = job.base + len(job.committed)
    answers = [Received(V2, Expanded(0, 0, n, (), (), ())) for n in (base - 1, base, base + 1)]  # type: ignore[arg-type]
    for wrong in (answers[0], answers[2]):
        with pytest.raises(RemoteProtocolError, match="awaits no draft"):
            driven.feed(wrong)
    driven.feed(answers[1])
    with pytest.raises(RemoteProtocolError, match="awaits no draft"):
        driven.feed(answers[1])


def test_a_verdict_comes_from_the_last_stage_and_credit_from_the_first() -> None:
    driven = draft(stages=2)
    driven.feed(Submitted(ask(0, prompt=(1,))))
    for peer, message in ((V1, verdict(0, {0: 5}).message), (V2, Credit(1000))):
        with pytest.raises(RemoteProtocolError, match="unexpected"):
            driven.feed(Received(peer, message))


def test_speeds_of_users_and_pass_times_go_to_the_first_stage() -> None:
    for message in (Rates(SessionId(0)), PassTimes(Rank(2), (1.0,), (0.1,))):
        with pytest.raises(RemoteProtocolError, match="unexpected"):
            stage(2, 3).feed(Received(DRAFT, message))


def test_a_session_with_nothing_to_send_takes_no_credit_of_others() -> None:
    driven = draft()
    waiting = ask(1, prompt=(1,), policy="autoregressive")
    assert len(sent(driven.feed(Submitted(waiting)), Segment)) == 1
    long = ask(2, prompt=(1,) * 300, policy="autoregressive")
    chunks = sent(driven.feed(Submitted(long)), Segment)
    assert sum(len(chunk.ids) for chunk in chunks) == 300


def test_a_stage_speaks_for_itself_alone() -> None:
    driven = draft(stages=2)
    for message in (Ready(V1, False), Closed(SessionId(0), V1, 0, 0, 0, 0.0, 0)):
        with pytest.raises(RemoteProtocolError, match="unexpected"):
            driven.feed(Received(V2, message))


# --- ends ---------------------------------------------------------------------------------------


def test_an_answer_ends_with_its_stop_token_and_its_limit() -> None:
    for changes, tokens, reason in (
        ({"stop_tokens": frozenset({6})}, (5, 6), "stop"),
        ({"max_new_tokens": 2}, (5, 6), "length"),
    ):
        driven = draft()
        request = ask(0, prompt=(1,), policy="autoregressive", **changes)
        effects = driven.feed(Submitted(request))
        effects += driven.feed(verdict(0, {0: 5}), verdict(1, {1: 6}))
        effects += driven.feed(Received(V1, Closed(SessionId(0), V1, 2, 2, 0, 0.0, 0)))
        assert tuple(t for e in effects if isinstance(e, Emit) for t in e.tokens) == tokens
        (finish,) = [e for e in effects if isinstance(e, Finish)]
        assert (finish.reason, finish.stats["new_tokens"]) == (reason, 2)


def test_a_request_ends_once_all_stages_have_reported_statistics() -> None:
    driven = draft(stages=2)
    driven.feed(Submitted(ask(0, prompt=(1,), policy="autoregressive")), Cancelled(0))
    effects = driven.feed(Received(V1, Closed(SessionId(0), V1, 0, 0, 0, 0.0, 0)))
    assert [e for e in effects if isinstance(e, Finish)] == []
    effects = driven.feed(Received(V2, Closed(SessionId(0), V2, 0, 0, 0, 0.0, 0)))
    assert len([e for e in effects if isinstance(e, Finish)]) == 1


def test_a_lost_stage_need_not_acknowledge_a_close() -> None:
    driven = draft(stages=2)
    driven.feed(Submitted(ask(0, prompt=(1,), policy="autoregressive")), Cancelled(0))
    driven.feed(Received(V1, Closed(SessionId(0), V1, 0, 0, 0, 0.0, 0)))
    assert len([e for e in driven.feed(LinkDown(V2)) if isinstance(e, Finish)]) == 1


def test_an_answer_that_is_cut_keeps_its_first_tokens() -> None:
    driven = draft()
    driven.feed(Submitted(ask(0, prompt=(1,), policy="autoregressive")))
    driven.feed(verdict(0, {0: 5}), verdict(1, {1: 6}))
    for kept in (0, 3):
        with pytest.raises(LocalProtocolError, match="an answer of 2 tokens cannot end"):
            driven.feed(Stopped(0, kept))
    effects = driven.feed(Stopped(0, 1))
    effects += driven.feed(Received(V1, Closed(SessionId(0), V1, 2, 2, 0, 0.0, 0)))
    (finish,) = [e for e in effects if isinstance(e, Finish)]
    assert (finish.reason, finish.stats["new_tokens"]) == ("stop", 1)


def test_nothing_is_opened_while_a_stage_has_no_link_to_the_next() -> None:
    driven = draft(stages=2)
    driven.feed(Received(V1, Ready(V1, False)))
    assert sent(driven.feed(Submitted(ask(0))), Open) == []
    assert len(sent(driven.feed(Received(V1, Ready(V1, True))), Open)) == 1


def test_requests_of_a_broken_pipeline_go_before_those_that_wait() -> None:
    driven = draft(stages=1)
    driven.feed(*(Submitted(ask(n, prompt=(n,))) for n in range(6)))
    assert [job.request.request for job in driven.state.backlog] == [4, 5]
    driven.feed(LinkDown(V1))
    assert [job.request.request for job in driven.state.backlog] == [0, 1, 2, 3, 4, 5]
