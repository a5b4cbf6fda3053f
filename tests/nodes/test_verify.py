"""The stage machine by example: effects as they must be, trap by trap."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from asyncspec.core.jobs import Admit, Compact, Release, SamplerOutput, TensorRows
from asyncspec.core.machine import (
    Compute,
    Effect,
    LinkDown,
    LinkUp,
    Received,
    Send,
    SendClosed,
    TimerFired,
)
from asyncspec_nodes.roles.verify.config import VerifyConfig
from asyncspec_nodes.roles.verify.machine import VerifyMachine
from asyncspec_protocol.errors import LocalProtocolError, RemoteProtocolError
from asyncspec_protocol.framing import decode, encode, write_frame
from asyncspec_protocol.ids import DRAFT, Rank, SessionId
from asyncspec_protocol.limits import MAX_NODES, MAX_SECONDS, MAX_TENSOR_BYTES, MAX_TOKEN
from asyncspec_protocol.messages import (
    FINAL,
    Close,
    Credit,
    Floor,
    Message,
    PruneIndices,
    Ready,
    Segment,
    Verdict,
)
from nodes.machine_driver import (
    Driven,
    abandoned,
    announced,
    done,
    opening,
    passes,
    prune,
    segment,
    sent,
    stage,
)


def test_a_segment_becomes_a_pass_and_a_verdict() -> None:
    last = stage()
    (job,) = passes(last.feed(Received(DRAFT, segment(0, {0: -1}))))
    assert job.tokens == (0,)
    assert job.sampled_rows == (0,)
    assert sent(last.feed(done(job, (7,))), Verdict) == [
        Verdict(0, 0, 0, (0,), (7,), stage_seconds=1.0, pass_number=1)
    ]


def test_a_session_of_an_unlinked_draft_node() -> None:
    middle = stage(2, 3)
    middle.feed(LinkDown(Rank(1)))
    with pytest.raises(RemoteProtocolError, match="not linked"):
        middle.feed(Received(Rank(1), opening(1, session=5)))


def test_prompt_nodes_but_the_last_need_no_verdict() -> None:
    last = stage(prompt_length=4)
    (job,) = passes(last.feed(Received(DRAFT, segment(0, {0: -1, 1: 0}))))
    assert job.sampled_rows == ()
    assert sent(last.feed(done(job, ())), Verdict) == []
    (job,) = passes(last.feed(Received(DRAFT, segment(1, {2: 1, 3: 2}))))
    assert job.sampled_rows == (1,)


def test_tokens_go_all_the_way_where_draws_depend_on_them() -> None:
    """And dead rows lose theirs on the way like their hidden states."""
    penalties = replace(
        opening(1, session=1), presence_penalty=0.5, prompt_length=3, resumed_tokens=2
    )
    middle, last = stage(2, 3), stage(3, 3)
    for driven, before in ((middle, 1), (last, 2)):
        (admit,) = [
            e.job for e in driven.feed(Received(Rank(before), penalties)) if isinstance(e, Compute)
        ]
        assert isinstance(admit, Admit)
        assert admit.prompt_length == 1
        assert admit.sampling.presence_penalty == 0.5
    nodes = segment(0, {0: -1, 1: 0, 2: 1, 3: 2, 4: 2}, session=1)
    (job,) = passes(middle.feed(Received(Rank(1), nodes, object())))
    assert job.tokens == ()
    middle.feed(Received(DRAFT, PruneIndices(SessionId(1), 1, 5, (0, 1, 2), (4,))))  # type: ignore[arg-type]
    (onward,) = sent(middle.feed(done(job, object())), Segment)
    assert onward.tokens == onward.ids == (0, 1, 2, 4)
    (job,) = passes(last.feed(Received(Rank(2), onward, object())))
    assert job.tokens == (0, 1, 2, 4)


def test_a_session_with_more_live_nodes_than_it_was_opened_for() -> None:
    """One token and a tree of four: what waits counts, what is dead does not."""
    first = stage()
    few = replace(opening(1, session=1), capacity=1, max_tree_nodes=4)
    first.feed(Received(DRAFT, few))
    first.feed(Received(DRAFT, segment(0, {0: -1, 1: 0, 2: 0}, session=1)))
    first.feed(Received(DRAFT, segment(1, {3: 1, 4: 1}, session=1)))
    first.feed(Received(DRAFT, PruneIndices(SessionId(1), 1, 5, (1,), (3,))))  # type: ignore[arg-type]
    first.feed(Received(DRAFT, segment(2, {5: 3, 6: 3}, session=1)))
    with pytest.raises(RemoteProtocolError, match="1 has 6 live nodes, and was opened for 5"):
        first.feed(Received(DRAFT, segment(3, {7: 3}, session=1)))


def test_a_tree_with_more_nodes_than_it_was_opened_for() -> None:
    """Whatever its session has room for: each node of a path sees all before it."""
    first = stage()
    first.feed(Received(DRAFT, replace(opening(1, session=1), capacity=65536, max_tree_nodes=0)))
    first.feed(Received(DRAFT, segment(0, {0: -1}, session=1)))
    chain = {number: number - 1 for number in range(1, MAX_NODES + 1)}
    with pytest.raises(RemoteProtocolError, match=r"1 has a tree of 4096 nodes, and .* for 0"):
        first.feed(Received(DRAFT, segment(1, chain, session=1)))


def test_what_is_committed_is_no_node_of_a_tree() -> None:
    """A prompt and a new root under way, and what a prune has committed of the cache."""
    first = stage()
    first.feed(Received(DRAFT, replace(opening(3, session=1), max_tree_nodes=2)))
    for number, some in enumerate(({0: -1, 1: 0}, {2: 1, 3: 2, 4: 3})):
        first.feed(Received(DRAFT, segment(number, some, session=1)))
    with pytest.raises(RemoteProtocolError, match="1 has a tree of 3 nodes"):
        first.feed(Received(DRAFT, segment(2, {5: 2}, session=1)))
    first.feed(Received(DRAFT, PruneIndices(SessionId(1), 1, 6, (3, 5), ())))  # type: ignore[arg-type]
    first.feed(Received(DRAFT, segment(2, {5: 3}, session=1)))
    (job,) = passes(first.feed(done(first.state.running.job, ())))
    first.feed(Received(DRAFT, segment(3, {6: 5, 7: 6}, session=1)))
    with pytest.raises(RemoteProtocolError, match="1 has a tree of 3 nodes"):
        first.feed(Received(DRAFT, segment(4, {8: 7}, session=1)))
    first.feed(done(job, tuple(9 for _ in job.sampled_rows)))
    with pytest.raises(RemoteProtocolError, match="1 has a tree of 3 nodes"):
        first.feed(Received(DRAFT, segment(4, {8: 7}, session=1)))


def wide(**changes: Any) -> Driven:
    """The only stage, of rows of 64 KiB, with session 0, whose root has been computed."""
    config = VerifyConfig(Rank(1), 1, row_bytes=65536)
    driven = Driven(VerifyMachine(config))
    opened = replace(opening(1), capacity=1, max_tree_nodes=MAX_NODES, **changes)
    driven.feed(LinkUp(DRAFT), Received(DRAFT, opened))
    (job,) = passes(driven.feed(Received(DRAFT, segment(0, {0: -1}))))
    driven.feed(done(job, sampled_output(1, opened.top_logprobs, bool(opened.features))))
    return driven


def sampled_output(rows: int, top: int, featured: bool) -> SamplerOutput:
    """What takes most bytes on the wire."""
    tokens, log_probs = (MAX_TOKEN,) * top, (-0.1,) * top
    each = ((tokens, log_probs),) * rows if top else ()
    return SamplerOutput(
        (MAX_TOKEN,) * rows, "features" if featured else None, each, (-0.1,) * rows
    )


@pytest.mark.parametrize("top", [0, 20, 256])
@pytest.mark.parametrize("depths", [0, 3, 64])
def test_what_is_sent_of_the_largest_segment_fits_a_frame(top: int, depths: int) -> None:
    """And a larger one is refused: this node would end with the frame that it could not send."""
    features = tuple(range(depths))
    driven = wide(top_logprobs=top, features=features, log_probs=True)
    most = driven.state.sessions[0].max_rows
    assert 0 < most <= MAX_NODES
    assert most == MAX_NODES or top == 256 or depths
    rows = dict.fromkeys(range(1, most + 1), 0)
    if most < MAX_NODES:
        with pytest.raises(RemoteProtocolError, match=f"a segment of {most + 1} rows") as caught:
            driven.feed(Received(DRAFT, segment(1, {**rows, most + 1: 0})))
        assert caught.value.peer == DRAFT
    (job,) = passes(driven.feed(Received(DRAFT, segment(1, rows))))
    (verdict,) = sent(driven.feed(done(job, sampled_output(most, top, bool(features)))), Verdict)
    write_frame(verdict)
    assert most * (1 + depths) * 65536 <= MAX_TENSOR_BYTES


def test_trap_one_row_segment_with_siblings_in_the_cache() -> None:
    """The released FlowSpec lets such a row attend to its siblings."""
    last = stage()
    (job,) = passes(last.feed(Received(DRAFT, segment(0, {0: -1, 1: 0, 2: 0, 3: 1}))))
    last.feed(done(job, (9, 9, 9, 9)))
    (job,) = passes(last.feed(Received(DRAFT, segment(1, {4: 2}))))
    assert job.committed == 1
    assert job.rows[0].visible == (2, 4)


def test_trap_non_contiguous_accepted_path_is_compacted_on_every_stage() -> None:
    for rank in (1, 2, 3):
        middle = stage(rank, 3)
        tensor = None if rank == 1 else object()
        nodes = segment(0, {0: -1, 1: 0, 2: 0, 3: 1, 4: 2, 5: 2}, tokens=rank == 1)
        (job,) = passes(middle.feed(Received(Rank(rank - 1), nodes, tensor)))
        middle.feed(done(job, tuple(9 for _ in job.sampled_rows)))
        effects = middle.feed(prune(1, 6, (2, 4), ()))
        assert [e.job for e in effects if isinstance(e, Compute)] == [Compact(0, 1, (2, 4))]
        slots = middle.state.sessions[0].slots
        assert (slots.committed, slots.tip, slots.speculative_nodes) == (3, 4, ())


def test_trap_an_emptied_segment_vanishes_and_gives_its_place_back() -> None:
    first = stage(1, 2)
    (job,) = passes(first.feed(Received(DRAFT, segment(0, {0: -1}))))
    first.feed(Received(DRAFT, segment(1, {1: 0, 2: 0})))
    effects = first.feed(prune(1, 4, (3,), ()))
    assert first.state.queue == ()
    assert sent(effects, Credit) == [Credit(10, 8)]
    effects = first.feed(done(job, object()))
    assert passes(effects) == []


def test_rows_that_die_in_a_waiting_segment_are_not_computed() -> None:
    second = stage(2, 2)
    handle = object()
    (job,) = passes(second.feed(Received(Rank(1), segment(0, {0: -1}, tokens=False), handle)))
    second.feed(Received(Rank(1), segment(1, {1: 0, 2: 0, 3: 1}, tokens=False), handle))
    second.feed(prune(1, 4, (1,), (3,)))
    (job,) = passes(second.feed(done(job, (1,))))
    assert job.hidden == TensorRows(handle, (0, 2))


def test_rows_that_die_during_their_pass_are_not_sent_on_and_counted() -> None:
    first = stage(1, 2)
    (job,) = passes(first.feed(Received(DRAFT, segment(0, {0: -1, 1: 0, 2: 0}))))
    first.feed(prune(1, 4, (2, 3), ()))
    result = object()
    effects = first.feed(done(job, result))
    (onward,) = [e for e in effects if isinstance(e, Send) and isinstance(e.message, Segment)]
    assert onward.message.ids == (0, 2)
    assert onward.tensor == TensorRows(result, (0, 2))
    assert onward.message.applied == 0
    assert first.state.sessions[0].dead_rows == 1


def test_a_pass_whose_rows_have_all_died_is_abandoned_once() -> None:
    last = stage()
    (root,) = passes(last.feed(Received(DRAFT, segment(0, {0: -1}))))
    last.feed(done(root, (5,)))
    (job,) = passes(last.feed(Received(DRAFT, segment(1, {1: 0, 2: 0}))))
    assert not abandoned(last.feed(prune(1, 3, (), (2,))))
    assert abandoned(last.feed(prune(2, 4, (3,), ()))) == [job]
    assert not abandoned(last.feed(prune(3, 4, (3,), ())))
    assert not sent(last.feed(done(job, ())), Verdict)
    assert last.state.running is None
    assert last.state.sessions[0].dead_rows == 2


def test_closing_a_session_abandons_its_pass() -> None:
    first = stage(1, 2)
    (job,) = passes(first.feed(Received(DRAFT, segment(0, {0: -1}))))
    assert abandoned(first.feed(Received(DRAFT, Close(SessionId(0))))) == [job]


def test_the_stamp_is_the_smallest_version_on_the_way() -> None:
    first = stage(1, 2)
    stamped = segment(0, {0: -1})
    (job,) = passes(first.feed(prune(3, 0, (), ()), Received(DRAFT, stamped)))
    (onward,) = sent(first.feed(done(job, object())), Segment)
    assert onward.applied == 0


@pytest.mark.parametrize("rank", [1, 2])
def test_times_of_stages_stay_within_what_may_travel(rank: int) -> None:
    """And a draft node's segments were at no stage before."""
    driven = stage(rank, rank + 1)
    timed = replace(segment(0, {0: -1}, tokens=rank == 1), stage_seconds=MAX_SECONDS)
    tensor = None if rank == 1 else object()
    (job,) = passes(driven.feed(Received(Rank(rank - 1), timed, tensor)))
    (onward,) = sent(driven.feed(done(job, object())), Segment)
    decode(encode(onward))
    assert onward.stage_seconds == (1.0 if rank == 1 else MAX_SECONDS)


def test_an_old_prune_changes_nothing() -> None:
    last = stage()
    last.feed(prune(5, 9, (), (8,)))
    before = last.state
    assert last.feed(prune(4, 9, (), ())) == []
    assert last.state == before


def tried() -> Driven:
    """The only stage, which knows what passes take, with a session whose root is computed."""
    config = VerifyConfig(Rank(1), 1, tried_rows=(1, 16), tried_microseconds=(1000, 2000))
    only = Driven(VerifyMachine(config))
    only.feed(LinkUp(DRAFT), Received(DRAFT, replace(opening(1), max_tree_nodes=MAX_NODES)))
    only.feed(Received(DRAFT, segment(0, {0: -1})))
    return only


def test_a_pass_that_takes_long_to_plan_is_planned_once() -> None:
    """When it starts: not after every message that comes before."""
    only = tried()
    running = only.state.running.job
    chain = {number: number - 1 for number in range(1, 2001)}
    for version in range(1, 3):
        effects = only.feed(prune(version, 0, (), ()), Received(DRAFT, segment(1, chain)))
        assert not announced(effects)
        chain = {2001: 2000}
    effects = only.feed(done(running, (9,)))
    assert [len(job.rows) for job in passes(effects)] == [2000]
    # What follows is planned soon.
    assert announced(effects)


def test_an_old_prune_plans_nothing_anew() -> None:
    """There may be any number of them."""
    only = tried()
    assert announced(only.feed(Received(DRAFT, segment(1, {1: 0}))))
    before = only.state
    assert only.feed(prune(0, 0, (), ())) == []
    assert only.state is before


def test_without_credit_a_result_is_parked_and_nothing_is_started() -> None:
    first = stage(1, 2)
    first.feed(LinkDown(Rank(2)), LinkUp(Rank(2)))
    first.feed(Received(DRAFT, opening(1, session=1)))
    (job,) = passes(first.feed(Received(DRAFT, segment(0, {0: -1}, session=1))))
    first.feed(Received(DRAFT, segment(1, {1: 0}, session=1)))
    effects = first.feed(done(job, object()))
    assert sent(effects, Segment) == []
    assert passes(effects) == []
    effects = first.feed(Received(Rank(2), Credit(1)))
    assert [m.ids for m in sent(effects, Segment)] == [(0,)]
    assert len(passes(effects)) == 1


def test_close_frees_everything_and_reports_statistics() -> None:
    last = stage()
    (job,) = passes(last.feed(Received(DRAFT, segment(0, {0: -1}))))
    effects = last.feed(Received(DRAFT, Close(SessionId(0))))
    assert [e.job for e in effects if isinstance(e, Compute)] == [Release(SessionId(0))]
    (report,) = last.feed(done(job, (3,)))
    assert report == SendClosed(DRAFT, 0, passes=1, rows=1, dead_rows=0, compute_seconds=0.5)
    # Whoever closes it once more, a prompt that was kept say, is told that nothing is left.
    again = last.feed(Received(DRAFT, Close(SessionId(0))))
    assert again == [replace(report, passes=0, rows=0, compute_seconds=0.0)]


def test_close_may_overtake_open() -> None:
    last = stage()
    assert last.feed(Received(DRAFT, Close(SessionId(1)))) == []
    effects = last.feed(Received(DRAFT, opening(1, session=1)))
    assert [e for e in effects if isinstance(e, Compute)] == []
    assert [e.session for e in effects if isinstance(e, SendClosed)] == [1]
    assert last.feed(Received(DRAFT, segment(0, {0: -1}, session=1))) == [Send(DRAFT, Credit(9, 8))]


def test_a_floor_ends_sessions_that_the_draft_node_could_not_close() -> None:
    last = stage()
    effects = last.feed(Received(DRAFT, Floor(SessionId(5))))
    assert [e.job for e in effects if isinstance(e, Compute)] == [Release(SessionId(0))]
    assert last.feed(Received(DRAFT, opening(1, session=4))) == []
    assert not last.state.sessions


def test_a_session_opened_without_a_next_stage_ends_at_once() -> None:
    """The next stage will never hear of it, so nothing of it may be sent there later."""
    first = stage(1, 2)
    first.feed(LinkDown(Rank(2)))
    assert first.feed(Received(DRAFT, opening(1, session=1))) == []
    effects = first.feed(Received(DRAFT, segment(0, {0: -1}, session=1)))
    assert sent(effects, Credit) == [Credit(9, 8)]
    effects = first.feed(LinkUp(Rank(2)), Received(Rank(2), Credit(2)))
    assert sent(effects, Segment) == []
    assert not first.state.sessions


@pytest.mark.parametrize("peer", [3, 4, 7])
def test_losing_a_node_that_is_no_neighbour_ends_no_session(peer: int) -> None:
    """No stage would report a break, and requests would wait for ever."""
    first = stage(1, 3)
    assert not any(is_over(e) for e in first.feed(LinkUp(Rank(peer)), LinkDown(Rank(peer))))
    assert set(first.state.sessions) == {0}


def is_over(effect: Effect) -> bool:
    return isinstance(effect, SendClosed) or effect == Compute(Release(SessionId(0)))


def test_losing_the_next_stage_is_reported_to_the_draft_node() -> None:
    first = stage(1, 2)
    down, up = (Ready(Rank(1), up, 0, SessionId(0), SessionId(0)) for up in (False, True))
    assert Send(DRAFT, down) in first.feed(LinkDown(Rank(2)))
    assert Send(DRAFT, up) in first.feed(LinkUp(Rank(2)))


def test_a_session_that_cannot_be_announced_to_the_next_stage_is_over() -> None:
    """Else its segments would reach a stage that has never heard of it, once the link is back."""
    first = stage(1, 2)
    first.feed(LinkDown(Rank(2)))
    first.feed(
        Received(DRAFT, opening(1, session=1)), Received(DRAFT, segment(0, {0: -1}, session=1))
    )
    effects = first.feed(LinkUp(Rank(2)), Received(Rank(2), Credit(5)))
    assert sent(effects, Segment) == []
    assert first.state.sessions == {}


@pytest.mark.parametrize(
    ("peer", "message", "tensor", "text"),
    [
        (0, segment(0, {5: 3}), None, "does not follow its parent"),
        (0, segment(0, {0: -1}, session=9), None, "never opened"),
        (0, segment(0, {0: -1}, tokens=False), None, "without its rows' input"),
        (0, segment(0, {0: -1}), object(), "without its rows' input"),
        (0, Verdict(SessionId(0), 0, 0, (), ()), None, "unexpected Verdict"),  # type: ignore[arg-type]
        (2, Credit(1), None, "credit was taken back"),
        (2, segment(0, {0: -1}), None, "unexpected Segment"),
    ],
)
def test_messages_that_a_peer_must_not_send(
    peer: int, message: Message, tensor: object, text: str
) -> None:
    first = stage(1, 2)
    before = first.state
    with pytest.raises(RemoteProtocolError, match=text) as caught:
        first.feed(Received(Rank(peer), message, tensor))
    assert caught.value.peer == peer
    assert first.state is before


def test_a_token_outside_the_vocabulary_is_the_peers_fault() -> None:
    machine = VerifyMachine(VerifyConfig(Rank(1), 1, vocab=5))
    driven = Driven(machine)
    driven.feed(LinkUp(DRAFT), Received(DRAFT, opening(1)))
    with pytest.raises(RemoteProtocolError, match="not in the vocabulary"):
        driven.feed(Received(DRAFT, segment(0, {0: -1, 5: 0})))


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_a_later_stage_takes_tokens_if_and_only_if_it_needs_them(penalty: float) -> None:
    last = stage(2, 2)
    last.feed(Received(Rank(1), replace(opening(1, session=1), frequency_penalty=penalty)))
    wrong = segment(0, {0: -1}, tokens=not penalty, session=1)
    with pytest.raises(RemoteProtocolError, match="without its rows' input"):
        last.feed(Received(Rank(1), wrong, object()))
    right = segment(0, {0: -1}, tokens=bool(penalty), session=1)
    assert passes(last.feed(Received(Rank(1), right, object())))


def test_features_travel_with_their_rows_and_die_with_them() -> None:
    """Two stages of a layer each, depths 1 and 2: the first sends one tap a row, the last adds its
    own and says whose the features are. Prompt nodes before the last are featured unjudged."""
    first = stage(1, 2, prompt_length=2, features=(1, 2))
    (job,) = passes(first.feed(Received(DRAFT, segment(0, {0: -1, 1: 0, 2: 1, 3: 1}))))
    first.feed(prune(1, 4, (), (2,)))
    (onward,) = [e for e in first.feed(done(job, "hidden")) if isinstance(e, Send)]
    assert onward.message == replace(
        segment(0, {0: -1, 1: 0, 2: 1}, tokens=False, aux_states=1),
        stage_seconds=2.0,
        pass_number=1,
    )
    assert onward.tensor == TensorRows("hidden", (0, 1, 2))
    last = stage(2, 2, prompt_length=2, features=(1, 2))
    (job,) = passes(last.feed(Received(Rank(1), onward.message, "arrived")))
    assert job.sampled_rows == (1, 2)
    last.feed(prune(2, 5, (), ()))
    (verdict,) = [
        e for e in last.feed(done(job, SamplerOutput((7, 8), "features"))) if isinstance(e, Send)
    ]
    expected = Verdict(SessionId(0), 0, 0, (1,), (7,), (0, 1), pass_number=1)  # type: ignore[arg-type]
    assert verdict.message == replace(expected, stage_seconds=4.0)
    assert verdict.tensor == TensorRows("features", (0, 1))


def test_features_of_a_prefill_chunk_come_in_an_empty_verdict() -> None:
    only = stage(prompt_length=4, features=(FINAL,))
    (job,) = passes(only.feed(Received(DRAFT, segment(0, {0: -1, 1: 0}))))
    (verdict,) = sent(only.feed(done(job, SamplerOutput((), "features"))), Verdict)
    assert (verdict.ids, verdict.tokens, verdict.feature_ids) == ((), (), (0, 1))


@pytest.mark.parametrize("count", [0, 2])
def test_a_segment_with_other_auxiliary_states_than_its_session_has(count: int) -> None:
    last = stage(2, 2, features=(1, 2))
    with pytest.raises(RemoteProtocolError, match=f"segment with {count} auxiliary states a row"):
        last.feed(Received(Rank(1), segment(0, {0: -1}, tokens=False, aux_states=count), "hidden"))


def test_a_depth_the_target_does_not_have() -> None:
    only = stage()
    with pytest.raises(RemoteProtocolError, match="features of depth 2 of 1 layers"):
        only.feed(Received(DRAFT, opening(1, session=1, features=(1, 2))))


@pytest.mark.parametrize(("features", "result"), [((), SamplerOutput((7,), "x")), ((FINAL,), (7,))])
def test_a_device_that_mistakes_what_is_wanted(features: tuple[int, ...], result: object) -> None:
    only = stage(features=features)
    (job,) = passes(only.feed(Received(DRAFT, segment(0, {0: -1}))))
    with pytest.raises(LocalProtocolError, match="do not fit"):
        only.feed(done(job, result))


def test_a_segment_needs_credit() -> None:
    first = stage(1, 1, window=1)
    first.feed(Received(DRAFT, segment(0, {0: -1})), Received(DRAFT, segment(1, {1: 0})))
    with pytest.raises(RemoteProtocolError, match="without credit"):
        first.feed(Received(DRAFT, segment(2, {2: 0})))


def waited(number: int) -> Received:
    """A segment of one node, a chain's next, that had to wait for credit."""
    return Received(DRAFT, replace(segment(number, {number: number - 1}), waited=True))


def limits(effects: list[Effect]) -> list[int]:
    return [message.limit for message in sent(effects, Credit)]


def test_a_link_that_lets_the_stage_run_dry_gets_longer() -> None:
    only = stage(window=1)
    # It was sent as soon as it was there: a longer link would have changed nothing.
    first = only.feed(Received(DRAFT, segment(0, {0: -1})))
    assert limits(first) == [2]
    only.feed(done(passes(first)[0], (7,)))
    # One more place for the link, and the one in the queue.
    second = only.feed(waited(1))
    assert limits(second) == [3, 4]
    # The stage was busy when this one came: the window was large enough.
    assert limits(only.feed(waited(2))) == []
    assert only.state.inbound[DRAFT].extra == 1


def test_a_link_that_lets_segments_queue_gets_shorter_again() -> None:
    only = stage(window=1)
    job = passes(only.feed(waited(0)))[0]
    assert only.state.inbound[DRAFT].extra == 1
    only.feed(*(waited(number) for number in (1, 2)))
    started = only.feed(done(job, (7,)))
    # One still waits behind the pass that starts, so that this place is not given back.
    assert (limits(started), only.state.inbound[DRAFT].extra) == ([], 0)
    assert limits(only.feed(done(passes(started)[0], (7,)))) == [4]


@pytest.mark.parametrize(
    ("rank", "prompt", "coalesce", "extra"),
    [(2, 1, True, 1), (2, 1, False, 0), (2, 9, True, 0), (1, 1, True, 0)],
    ids=["late for a shared pass", "never shares one", "prefill chunks", "from the draft node"],
)
def test_a_link_that_parts_the_segments_of_a_pass_gets_longer(
    rank: int, prompt: int, coalesce: bool, extra: int
) -> None:
    """The running pass would have taken it in, had it not waited for credit."""
    last, peer = stage(rank, rank, prompt, coalesce=coalesce), Rank(rank - 1)

    def arrives(number: int, *, waited: bool) -> Received:
        message = segment(number, {number: number - 1}, tokens=rank == 1)
        return Received(peer, replace(message, waited=waited), None if rank == 1 else object())

    result = (7,) if prompt == 1 else ()
    (job,) = passes(last.feed(arrives(0, waited=False)))
    last.feed(done(job, result), arrives(1, waited=False), arrives(2, waited=False))
    # One waits by now, so the next pass has something to take in.
    last.feed(arrives(3, waited=True))
    assert last.state.inbound[peer].extra == 0
    last.feed(done(last.state.running.job, result))
    assert len(last.state.running.parts) == 1 + (coalesce and prompt == 1)
    while last.state.queue:
        last.feed(done(last.state.running.job, result))
    last.feed(arrives(4, waited=True))
    assert last.state.inbound[peer].extra == extra


def test_no_link_is_longer_than_memory_allows() -> None:
    config = VerifyConfig(Rank(1), 1, window=1, max_window=2)
    only = Driven(VerifyMachine(config))
    only.feed(LinkUp(DRAFT), Received(DRAFT, opening(1)))
    for number in range(4):
        effects = only.feed(waited(number))
        only.feed(done(passes(effects)[0], (7,)))
    assert only.state.inbound[DRAFT].extra == 1


def test_a_stage_says_which_segments_had_to_wait_for_credit() -> None:
    middle = Driven(VerifyMachine(VerifyConfig(Rank(1), 2)))
    middle.feed(LinkUp(DRAFT), LinkUp(Rank(2)), Received(Rank(2), Credit(1)))
    middle.feed(Received(DRAFT, opening(1)))
    onward: list[Segment] = []
    for number in range(2):
        effects = middle.feed(Received(DRAFT, segment(number, {number: number - 1})))
        onward += sent(middle.feed(done(passes(effects)[0], object())), Segment)
    assert len(onward) == 1
    onward += sent(middle.feed(Received(Rank(2), Credit(2))), Segment)
    assert [message.waited for message in onward] == [False, True]


def test_a_node_is_not_sent_twice() -> None:
    first = stage()
    first.feed(Received(DRAFT, segment(0, {0: -1, 1: 0})))
    with pytest.raises(RemoteProtocolError, match="does not follow"):
        first.feed(Received(DRAFT, segment(1, {1: 0})))


def test_a_stage_has_no_timers() -> None:
    with pytest.raises(LocalProtocolError):
        stage().feed(TimerFired("tea"))
