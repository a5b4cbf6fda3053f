"""What a lost link or a restart must not leave behind: the machines by hand, and short runs of the
simulator."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asyncspec.core.jobs import Release
from asyncspec.core.machine import (
    Cancelled,
    Compute,
    Emit,
    Finish,
    Input,
    LinkDown,
    LinkUp,
    Received,
    SetTimer,
    Submitted,
    TimerFired,
)
from asyncspec_nodes.roles.draft.config import DraftConfig
from asyncspec_nodes.roles.draft.lifecycle import break_timer
from asyncspec_nodes.roles.draft.machine import DraftMachine
from asyncspec_nodes.roles.draft.recovery import REJOIN
from asyncspec_nodes.roles.source import SourceConfig, SourceMachine
from asyncspec_nodes.roles.verify.lifecycle import SPARE_SESSIONS
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import (
    DRAFT,
    NodeId,
    Rank,
    SegmentId,
    SessionId,
    Version,
    draft_rank,
    first_session,
)
from asyncspec_protocol.messages import (
    Close,
    Closed,
    Credit,
    Expand,
    Floor,
    Message,
    Open,
    PruneIndices,
    Rates,
    Ready,
    Segment,
    Verdict,
    Withdraw,
)
from cluster import Cluster, ask
from laws import SMALL, Shaken, check_after
from nodes.machine_driver import Driven, done, draft, opening, passes, segment, sent, stage

V1, V2, V3 = Rank(1), Rank(2), Rank(3)
OTHER = draft_rank(1)
THEIRS = first_session(OTHER)


@pytest.mark.parametrize("lost", [V1, V2])
def test_every_stage_gets_a_floor_when_the_pipeline_is_complete_again(lost: Rank) -> None:
    driven = draft(stages=2)
    driven.feed(Submitted(ask(0)), Submitted(ask(1)))
    assert sent(driven.feed(LinkDown(lost), LinkUp(lost)), Floor) == []
    effects = driven.feed(Received(lost, Ready(lost, True)))
    for rank in (V1, V2):
        assert sent(effects, Floor, to=rank) == [Floor(SessionId(2))]


def test_a_source_gets_a_floor_when_it_is_back() -> None:
    driven = draft(stages=1, source=V2)
    driven.feed(LinkUp(V2), Submitted(ask(0)), LinkDown(V2))
    assert sent(driven.feed(LinkUp(V2)), Floor, to=V2) == [Floor(SessionId(1))]


def test_sessions_are_above_those_of_a_clock_that_has_been_set_back_since() -> None:
    """A draft node that starts again numbers from its clock on; stages know what it has opened."""
    driven = draft(stages=2)
    driven.feed(LinkDown(V1), LinkUp(V1))
    effects = driven.feed(Received(V1, Ready(V1, True, opened=SessionId(41))))
    assert sent(effects, Floor, to=V2) == [Floor(SessionId(42))]
    effects = driven.feed(Submitted(ask(0)))
    assert [one.session for one in sent(effects, Open, to=V1)] == [42]


def test_a_floor_ends_the_sessions_below_it_and_no_other() -> None:
    only = stage()
    only.feed(Received(DRAFT, opening(1, session=1)), Received(DRAFT, opening(1, session=2)))
    only.feed(*(Received(DRAFT, Close(SessionId(n))) for n in (4, 5)))
    effects = only.feed(Received(DRAFT, Floor(SessionId(2))))
    assert [e.job for e in effects if isinstance(e, Compute)] == [Release(0), Release(1)]  # type: ignore[arg-type]
    assert set(only.state.sessions) == {2}
    assert only.state.watermarks[DRAFT].closed_early == {4, 5}
    only.feed(Received(DRAFT, Floor(SessionId(5))))
    assert not only.state.sessions
    assert only.state.watermarks[DRAFT].closed_early == {5}
    # The last session below the floor is over; the floor itself may begin.
    only.feed(Received(DRAFT, Floor(SessionId(7))))
    assert only.feed(Received(DRAFT, opening(1, session=6))) == []
    only.feed(Received(DRAFT, opening(1, session=7)))
    assert set(only.state.sessions) == {7}


@pytest.mark.parametrize("number", [0, 1, 1023])
@pytest.mark.parametrize("kind", [Close, Floor, lambda name: opening(1, name)])
def test_the_last_session_ids_of_a_draft_node_are_never_used(
    number: int, kind: Callable[[SessionId], Message]
) -> None:
    """Ids only grow, also over restarts: the next node of that number would take no stage."""
    only, rank = stage(), draft_rank(number)
    only.feed(LinkUp(rank))
    end = first_session(rank) + 2**42
    before = only.state
    for name in (end - SPARE_SESSIONS, end - 1):
        with pytest.raises(RemoteProtocolError, match=r"one of the last ids") as caught:
            only.feed(Received(rank, kind(SessionId(name))))
        assert caught.value.peer == rank
        assert only.state is before
    only.feed(Received(rank, kind(SessionId(end - SPARE_SESSIONS - 1))), LinkDown(rank))
    (ready, *_) = sent(only.feed(LinkUp(rank)), Ready, to=rank)
    node = Driven(DraftMachine(DraftConfig(stages=1, first_session=first_session(rank))))
    node.feed(LinkUp(V1), Received(V1, ready))
    assert node.state.up


def test_a_floor_ends_kept_prompts_below_it_and_no_other() -> None:
    only = stage()
    only.feed(Received(DRAFT, opening(1, session=1)))
    for name in (0, 1):
        (job,) = passes(only.feed(Received(DRAFT, segment(0, {0: -1}, session=name))))
        only.feed(done(job, (5,)), Received(DRAFT, Close(SessionId(name), keep=True)))
    assert only.state.cached_prompts == {0: 1, 1: 1}
    only.feed(Received(DRAFT, Floor(SessionId(1))))
    assert only.state.cached_prompts == {1: 1}


def test_a_source_forgets_the_sessions_below_a_floor_and_no_other() -> None:
    source = Driven(SourceMachine(SourceConfig(V2)))
    source.feed(*(Received(DRAFT, expand(name)) for name in (0, 1, 2)))
    source.feed(Received(DRAFT, Floor(SessionId(2))))
    assert set(source.state.sessions) == {2}
    source.feed(Received(DRAFT, expand(1)), Received(DRAFT, expand(3)))
    assert set(source.state.sessions) == {2, 3}


def expand(session: int) -> Expand:
    return Expand(SessionId(session), Version(0), 0, (1,), 0, 0, 0)


def test_a_restarted_job_goes_on_behind_the_last_token_that_was_given() -> None:
    driven = draft(stages=1)
    driven.feed(Submitted(ask(0, prompt=(1, 2), policy="autoregressive")))
    given: list[int] = []
    for number, node in enumerate((1, 2, 3)):
        said = Verdict(SessionId(0), number, 0, (node,), (7 + node,))  # type: ignore[arg-type]
        effects = driven.feed(Received(V1, said))
        given += [token for e in effects if isinstance(e, Emit) for token in e.tokens]
    assert given == [8, 9, 10]
    driven.feed(LinkDown(V1), LinkUp(V1))
    effects = driven.feed(Received(V1, Ready(V1, True)), Received(V1, Credit(9)))
    assert [(m.session, m.prompt_length) for m in sent(effects, Open)] == [(1, 5)]
    assert sum((message.tokens for message in sent(effects, Segment)), ()) == (1, 2, 8, 9, 10)


def computes(rank: Rank, layers: tuple[int, int], processor: str) -> Received:
    """A stage's report of its layers."""
    return Received(rank, Ready(rank, True, processor=processor, layers=layers))


@pytest.mark.parametrize("cut", [1, 4, 7])
def test_where_layers_are_cut_among_like_processors_makes_no_difference(cut: int) -> None:
    driven = draft(stages=2)
    driven.feed(computes(V1, (0, cut), "Intel AVX2"), computes(V2, (cut, 8), "Intel AVX2"))
    assert driven.state.layer_processors == ((8, "Intel AVX2"),)
    driven.feed(computes(V2, (cut, 8), "AMD AVX2"))
    assert driven.state.layer_processors == ((cut, "Intel AVX2"), (8, "AMD AVX2"))


@pytest.mark.parametrize(
    ("kind", "tokens", "changes"),
    [
        ("AMD AVX2", 1, None),
        ("Intel AVX2", 1, 1),
        # Nothing was written before, or nothing is known.
        ("Intel AVX2", 0, None),
        ("", 1, None),
    ],
)
def test_an_answer_that_goes_on_on_an_unlike_processor_says_so(
    kind: str, tokens: int, changes: int | None
) -> None:
    driven = draft(stages=2)
    driven.feed(computes(V1, (0, 4), "Intel AVX2"), computes(V2, (4, 8), "AMD AVX2"))
    driven.feed(Submitted(ask(0, prompt=(1, 2), policy="autoregressive")))
    for node in range(tokens):
        said = Verdict(SessionId(0), SegmentId(node), Version(0), (NodeId(1 + node),), (7,))
        driven.feed(Received(V2, said))
    driven.feed(LinkDown(V2), LinkUp(V2), computes(V2, (4, 8), kind))
    assert 1 in driven.state.sessions
    effects = driven.feed(Cancelled(0), *(TimerFired(f"stats:{n}") for n in (0, 1)))
    (finish,) = (effect for effect in effects if isinstance(effect, Finish))
    assert finish.stats.get("processor_changes") == changes


def test_a_source_that_reports_late_ends_no_kept_prompt() -> None:
    """Else the stages would not know what the next session begins with, and it would not end."""
    driven = draft(source=V2, min_common_prefix=1)
    driven.feed(LinkUp(V2))
    effects = driven.feed(Submitted(ask(0, prompt=(1, 2), policy="autoregressive")))
    assert sent(effects, Open)
    said = Verdict(SessionId(0), SegmentId(0), Version(0), (NodeId(1),), (7,))
    driven.feed(Received(V1, said), Cancelled(0))
    assert [one.session for one in driven.state.cached_prompts] == [0]
    assert sent(driven.feed(Received(V2, Ready(V2, True, 250))), Floor) == []


def test_what_a_lost_draft_node_has_closed_unopened_is_forgotten() -> None:
    """Their ``Open`` never comes now, and there may be any number of them."""
    last = stage(2, 2)
    last.feed(Received(DRAFT, Close(SessionId(5))))
    assert last.state.watermarks[DRAFT].closed_early == {5}
    last.feed(LinkDown(DRAFT))
    assert last.state.watermarks[DRAFT].closed_early == frozenset()


def closed(rank: Rank, session: int) -> Received:
    return Received(rank, Closed(SessionId(session), rank, 0, 0, 0, 0.0, 0))


@pytest.mark.parametrize("rank", [V1, V2, V3])
def test_a_session_that_a_node_has_ended_goes_on_elsewhere(rank: Rank) -> None:
    """A stage, or the token source. No report of a break follows."""
    driven = draft(stages=2, source=V3, rejoin_seconds=30.0)
    driven.feed(LinkUp(V3), Submitted(ask(0)))
    effects = driven.feed(closed(rank, 0))
    timer = SetTimer(break_timer(SessionId(0)), driven.now + 30.0)
    assert effects == [timer]
    assert driven.feed(closed(V1, 0)) == []
    effects = driven.feed(TimerFired(timer.timer))
    assert [one.session for one in sent(effects, Close, to=rank)] == [0]
    assert [one.session for one in sent(effects, Open, to=V1)] == [1]
    assert [one.counters.breaks for one in driven.state.sessions.values()] == [1]
    assert driven.feed(closed(V1, 0), closed(V2, 0), TimerFired(timer.timer)) == []


def test_a_request_whose_sessions_a_stage_ends_is_not_tried_for_ever() -> None:
    driven = draft(stages=1, max_breaks=3)
    driven.feed(Submitted(ask(0)))
    for session in range(3):
        driven.feed(closed(V1, session))
        effects = driven.feed(TimerFired(break_timer(SessionId(session))))
    assert [e.reason for e in effects if isinstance(e, Finish)] == ["error"]
    assert not driven.state.sessions


@pytest.mark.parametrize("end", [Cancelled(0), Received(V1, Ready(V1, False))])
def test_a_session_that_ends_otherwise_waits_for_no_break(end: Input) -> None:
    driven = draft(stages=2)
    driven.feed(Submitted(ask(0)), closed(V2, 0))
    assert SetTimer(break_timer(SessionId(0)), None) in driven.feed(end)
    assert not driven.state.sessions


def test_a_deadline_that_passes_when_the_pipeline_is_back_fails_no_request() -> None:
    """It was cancelled, but had gone off already."""
    driven = draft(stages=1)
    driven.feed(*(Submitted(ask(number, prompt=(1,))) for number in range(6)))
    waiting = driven.state.backlog
    assert waiting
    assert driven.feed(TimerFired(REJOIN)) == []
    assert driven.state.backlog == waiting


def test_breaks_are_counted_from_the_last_token_on() -> None:
    driven = draft(stages=1, max_breaks=3)
    driven.feed(Submitted(ask(0, prompt=(1, 2), policy="autoregressive")))
    for session in range(3):
        node = driven.state.sessions[session].tree.root
        said = Verdict(SessionId(session), 0, 0, (node,), (7,))
        driven.feed(Received(V1, said), LinkDown(V1))
        assert [job.counters.breaks for job in driven.state.backlog] == [1]
        driven.feed(LinkUp(V1), Received(V1, Ready(V1, True)), Received(V1, Credit(9)))
    driven.feed(LinkDown(V1))
    assert [job.counters.breaks for job in driven.state.backlog] == [2]


def test_a_request_that_had_brought_nothing_is_tried_alone_behind_those_that_had() -> None:
    driven = draft(stages=1, max_breaks=2)
    driven.feed(*(Submitted(ask(n, prompt=(1, 2), policy="autoregressive")) for n in range(2)))
    said = Verdict(SessionId(1), 0, 0, (driven.state.sessions[1].tree.root,), (7,))
    driven.feed(Received(V1, said), LinkDown(V1))
    assert [(job.request.request, job.counters.breaks) for job in driven.state.backlog] == [
        (1, 0),
        (0, 1),
    ]
    driven.feed(LinkUp(V1), Received(V1, Ready(V1, True)), Received(V1, Credit(9)))
    # A new request waits for the trial as well.
    driven.feed(Submitted(ask(2, prompt=(1, 2), policy="autoregressive")))
    opened = [2]
    for request in (1, 0, 2):
        assert [*driven.state.sessions] == opened
        session = driven.state.sessions[SessionId(opened[-1])]
        assert session.request.request == request
        said = Verdict(session.session, 0, 0, (session.tree.root,), (7,))
        driven.feed(Received(V1, said))
        opened.append(opened[-1] + 1)
    assert not driven.state.backlog


@pytest.mark.parametrize("policy", ["autoregressive", "flowspec", "pruned"])
def test_no_token_is_given_twice_or_left_out_when_links_are_lost(policy: str) -> None:
    cluster = Cluster(Shaken([1, 0, 2]), stages=2, policies=SMALL)
    request = ask(0, policy=policy)
    cluster.submit(request)
    for when, pair in ((20, (DRAFT, V2)), (60, (V1, V2)), (90, (DRAFT, V1))):
        cluster.world.at(when, cluster.world.cut, *pair)
        cluster.world.at(when + 5, cluster.connect_all)
    cluster.world.run(until=50_000.0, most_steps=20_000)
    check_after(cluster, [request])
    assert cluster.world.finished[0].stats["sessions"] > 1


@pytest.mark.parametrize(
    "message",
    [
        opening(1, 1),
        Open(
            SessionId(THEIRS + 1),
            3,
            9,
            0,
            0.0,
            0,
            1.0,
            parent_session=SessionId(0),
            common_prefix=1,
        ),
        segment(0, {0: -1}),
        PruneIndices(SessionId(0), Version(1), 0, (), ()),  # type: ignore[arg-type]
        Close(SessionId(0)),
        Floor(SessionId(1)),
        Floor(SessionId(THEIRS + (1 << 42))),
        Rates(SessionId(0), 0, *[0.5] * 7),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_stage_hears_of_a_session_from_its_own_draft_node_only(message: Message) -> None:
    only = stage()
    only.feed(LinkUp(OTHER))
    before = only.state
    with pytest.raises(RemoteProtocolError, match="is another draft node's") as caught:
        only.feed(Received(OTHER, message))
    assert caught.value.peer == OTHER
    assert only.state is before


@pytest.mark.parametrize(
    "message",
    [expand(0), Withdraw(SessionId(0)), Close(SessionId(0)), Floor(SessionId(1))],
    ids=lambda message: type(message).__name__,
)
def test_a_source_hears_of_a_session_from_its_own_draft_node_only(message: Message) -> None:
    source = Driven(SourceMachine(SourceConfig(V2)))
    source.feed(Received(DRAFT, expand(0)))
    before = source.state
    with pytest.raises(RemoteProtocolError, match="is another draft node's") as caught:
        source.feed(Received(OTHER, message))
    assert caught.value.peer == OTHER
    assert source.state is before


def lose_the_draft_node(driven: Driven) -> None:
    driven.feed(LinkDown(OTHER))


def close_the_session(driven: Driven) -> None:
    driven.feed(Received(OTHER, Close(THEIRS)))


def raise_the_floor(driven: Driven) -> None:
    driven.feed(Received(OTHER, Floor(SessionId(THEIRS + 1))))


@pytest.mark.parametrize("end", [lose_the_draft_node, close_the_session, raise_the_floor])
def test_rows_of_a_session_that_is_over_leave_the_queue(end: Callable[[Driven], None]) -> None:
    only = stage()
    only.feed(LinkUp(OTHER), Received(OTHER, opening(1, THEIRS)))
    only.feed(Received(DRAFT, segment(0, {0: -1})))
    for number in (0, 1):
        only.feed(Received(OTHER, segment(number, {number: number - 1}, session=THEIRS)))
    only.feed(Received(DRAFT, segment(1, {1: 0})))
    assert [w.session for w in only.state.queue] == [THEIRS, THEIRS, 0]
    end(only)
    assert [w.session for w in only.state.queue] == [0]


@pytest.mark.parametrize("end", [lose_the_draft_node, close_the_session, raise_the_floor])
def test_rows_of_a_session_that_is_over_are_not_sent_on(end: Callable[[Driven], None]) -> None:
    first = stage(1, 2)
    # The link to the next stage is new: there is no credit on it.
    first.feed(LinkDown(V2), LinkUp(V2), LinkUp(OTHER), Received(OTHER, opening(1, THEIRS)))
    (job,) = passes(first.feed(Received(OTHER, segment(0, {0: -1}, session=THEIRS))))
    first.feed(done(job, object()))
    assert [w.session for w in first.state.outbox] == [THEIRS]
    end(first)
    assert first.state.outbox == ()
    assert sent(first.feed(Received(V2, Credit(9))), Segment) == []


@pytest.mark.parametrize("order", [(V1, 0, V3), (V1, V3, 0), (V3, V1, 0), (0, V3, V1), (V3, 0, V1)])
def test_losses_of_one_moment_are_one_break_whenever_each_is_noticed(
    order: tuple[int, ...],
) -> None:
    """Two nodes are cut off at once, and the pipeline stands again between the reports; 0 is the
    second stage's, of the third."""
    driven = draft(stages=3)
    driven.feed(Submitted(ask(0)))
    cut = driven.now
    lost: int
    for lost in order:
        silent = driven.now + 1 - cut
        if lost:
            driven.feed(LinkDown(Rank(lost), "silent", silent))
        else:
            driven.feed(Received(V2, Ready(V2, False, silent=silent)))
        driven.feed(LinkUp(V1), *(Received(rank, Ready(rank, True)) for rank in (V1, V2)))
        driven.feed(LinkUp(V3), Received(V3, Ready(V3, True)), Received(V1, Credit(9)))
        ((_, session),) = driven.state.sessions.items()
        assert session.counters.breaks == 1


def test_a_peer_that_was_heard_after_a_break_makes_another_one() -> None:
    driven = draft(stages=2, max_breaks=3)
    driven.feed(Submitted(ask(0)), LinkDown(V1), LinkUp(V1), Received(V1, Ready(V1, True)))
    driven.feed(LinkDown(V2, "silent", 2.5))
    (queued,) = driven.state.backlog
    assert queued.counters.breaks == 2


def test_a_stage_says_how_long_the_next_one_has_been_silent() -> None:
    first = stage(1, 2)
    (down,) = sent(first.feed(LinkDown(V2, "silent", 2.5)), Ready)
    assert (down.up, down.silent) == (False, 2.5)
    assert [m.silent for m in sent(first.feed(LinkUp(V2)), Ready)] == [0.0]
