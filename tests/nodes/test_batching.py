"""Which segments share a pass."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.cost_model.rows import BatchCost
from asyncspec.core.jobs import Batch
from asyncspec.core.liveness import Liveness
from asyncspec.core.machine import Compute, Effect, Received, Send, SendClosed
from asyncspec_nodes.roles.draft.scheduler import with_batch_remaining
from asyncspec_nodes.roles.verify.batching import FairShare, select_batch
from asyncspec_nodes.roles.verify.session import QueuedSegment, StageSession, is_prefill
from asyncspec_protocol.ids import DRAFT, NodeId, Rank, SegmentId, SessionId, Version
from asyncspec_protocol.messages import Close, PassTimes, Segment, Verdict
from effort import examples
from nodes.machine_driver import Driven, done, opening, passes, segment, sent, stage

PROMPT = 40


@st.composite
def queues(draw: st.DrawFn) -> tuple[QueuedSegment, ...]:
    """Segments of up to five sessions, in the order in which they came; the first of some are of
    prompts, with or without the last token."""
    last = draw(st.integers(0, 4))
    sizes = draw(st.lists(st.tuples(st.integers(0, last), st.integers(1, 9)), min_size=1))
    found, read = [], set()
    for number, (session, rows) in enumerate(sizes):
        first = 100 if session in read else draw(st.sampled_from((100, 0, PROMPT - rows)))
        if first:
            read.add(session)
        ids = tuple(NodeId(first + i) for i in range(rows))
        over = draw(st.integers(0, 3))
        found.append(
            QueuedSegment(
                SessionId(session), SegmentId(number), Version(0), ids, ids, passed_over=over
            )
        )
    return tuple(found)


SESSIONS = {SessionId(i): StageSession(opening(PROMPT, i), Liveness(PROMPT)) for i in range(5)}


@given(queues(), st.integers(1, 40))
def test_a_pass_is_the_heads_of_some_sessions(queue: tuple[QueuedSegment, ...], most: int) -> None:
    taken, left = select_batch(queue, SESSIONS, most)
    assert taken
    assert len({w.session for w in taken}) == len(taken)
    assert len(taken) == 1 or sum(len(w.ids) for w in taken) <= most
    # Nothing is lost or changes places, and each session's order stays.
    numbers = [w.segment for w in queue]
    assert sorted(w.segment for w in (*taken, *left)) == numbers
    assert [w.segment for w in left] == sorted(w.segment for w in left)
    for waiting in taken:
        assert all(w.segment > waiting.segment for w in left if w.session == waiting.session)


@given(queues(), st.integers(1, 40))
def test_a_segment_skipped_too_often_goes_first(
    queue: tuple[QueuedSegment, ...], most: int
) -> None:
    taken, left = select_batch(queue, SESSIONS, most)
    heads = {w.session: w for w in reversed(queue)}
    late = [w for w in queue if heads[w.session] is w and w.passed_over >= PARAMETERS.max_skips]
    if late:
        assert late[0] in taken
    names = {w.segment for w in taken}
    for waiting in left:
        was = next(w for w in queue if w.segment == waiting.segment)
        head = heads[waiting.session] is was and was.segment not in names
        assert waiting.passed_over == was.passed_over + head


COALESCING = {
    name: replace(session, opening=replace(session.opening, coalesce=True))
    for name, session in SESSIONS.items()
}


@settings(max_examples=examples(300, quick=120))
@given(
    queues(),
    st.integers(1, 40),
    st.integers(0, 12),
    st.sampled_from([0.0, 0.03, 0.1, 0.3]),
    st.sampled_from([0.0, 0.02, 0.1, 0.2]),
)
def test_waiting_segments_join_their_session_where_rows_are_cheap(
    queue: tuple[QueuedSegment, ...], most: int, plateau: int, slope: float, line: float
) -> None:
    def seconds(rows: int) -> float:
        return 1.0 + slope * max(0, rows - plateau)

    costs = BatchCost(seconds, line)
    heads, _ = select_batch(queue, COALESCING, most)
    taken, left = select_batch(queue, COALESCING, most, (), costs)
    assert select_batch(queue, SESSIONS, most, (), costs)[0] == heads
    joined = [w for w in taken if w not in heads]
    assert [w for w in taken if w in heads] == list(heads)
    # A first token does not wait for what is guessed below the prompt.
    assert not {w.session for w in joined} & {w.session for w in heads if w.ids[0] < PROMPT}
    rows = sum(len(w.ids) for w in taken)
    assert len(taken) == 1 or rows <= most
    assert sorted(w.segment for w in (*taken, *left)) == [w.segment for w in queue]
    for waiting in taken:
        assert all(w.segment > waiting.segment for w in left if w.session == waiting.session)
    if joined:
        assert rows * line <= PARAMETERS.link_utilization * seconds(rows)
    if slope == line == 0 and rows < most - 9:
        # Rows are free and there was room for any of them: nothing is left of a pass's sessions
        # that have read their prompts.
        begun = {w.session for w in heads if w.ids[0] >= PROMPT}
        assert begun.isdisjoint(w.session for w in left)
    # Each delays all that is in the pass by then.
    rows = sum(len(w.ids) for w in heads)
    for behind, more in enumerate([len(w.ids) for w in joined], len(heads)):
        assert behind * (seconds(rows + more) - seconds(rows)) <= PARAMETERS.join_delay * seconds(
            more
        )
        rows += more


@given(queues(), st.integers(1, 40), st.integers(1, 40))
def test_a_pass_has_its_fair_share_of_dear_rows_and_any_number_of_free_ones(
    queue: tuple[QueuedSegment, ...], most: int, fair: int
) -> None:
    free, dear = BatchCost(lambda rows: 1.0), BatchCost(float)
    heads, _ = select_batch(queue, SESSIONS, most)
    assert select_batch(queue, SESSIONS, most, (), free, FairShare(fair))[0] == heads
    assert select_batch(queue, SESSIONS, most, (), dear, FairShare(most))[0] == heads
    assert select_batch(queue, SESSIONS, most, (), dear, FairShare(0, SESSIONS.keys()))[0] == heads
    taken, left = select_batch(queue, SESSIONS, most, (), dear, FairShare(fair))
    decoding = [len(w.ids) for w in taken if not is_prefill(w, SESSIONS[w.session])]
    assert sum(decoding) <= max([fair, *decoding[:1]])
    if len(queue) > 1:
        # Nothing is left that would have been within the share and the bound.
        rows = sum(len(w.ids) for w in taken)
        first = {w.session: w for w in reversed(left)}
        served = {w.session for w in taken}
        waiting = [w for s, w in first.items() if s not in served]
        bounds = [most if is_prefill(w, SESSIONS[w.session]) else min(fair, most) for w in waiting]
        assert all(rows + len(w.ids) > b for w, b in zip(waiting, bounds, strict=True))


@given(queues(), st.integers(1, 40), st.sets(st.sampled_from(sorted(SESSIONS))))
def test_an_exempt_session_takes_nothing_of_the_share(
    queue: tuple[QueuedSegment, ...], fair: int, exempt: set[SessionId]
) -> None:
    """They go whatever they bring, and the others as if they were alone."""
    dear = BatchCost(float)
    others = tuple(w for w in queue if w.session not in exempt)
    taken, _ = select_batch(queue, SESSIONS, 10_000, (), dear, FairShare(fair, exempt))
    heads, _ = select_batch(queue, SESSIONS, 10_000)
    assert {w for w in heads if w.session in exempt} <= {*taken}
    if len(others) > 1:
        alone, _ = select_batch(others, SESSIONS, 10_000, (), dear, FairShare(fair))
        assert [w for w in taken if w.session not in exempt] == list(alone)


@given(st.integers(1, 12), st.integers(1, 8), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_nothing_waits_for_ever_for_a_fair_share(most: int, fair: int, sizes: list[int]) -> None:
    """Whoever is left behind is not overtaken by those that come again meanwhile."""
    dear = BatchCost(float)

    def one(session: int, number: int, size: int) -> QueuedSegment:
        ids = tuple(NodeId(100 + i) for i in range(size))
        return QueuedSegment(SessionId(session), SegmentId(number), Version(0), ids, ids)

    queue = tuple(one(session, 0, size) for session, size in enumerate([*sizes, 4]))
    for number in range(1, len(sizes) + 2):
        taken, queue = select_batch(queue, SESSIONS, most, (), dear, FairShare(fair))
        if any(w.session == len(sizes) for w in taken):
            return
        queue = (*queue, *(one(w.session, number, len(w.ids)) for w in taken))
    raise AssertionError("the last of them was never served")


def reports(effects: list[Effect]) -> list[SendClosed]:
    return [e for e in effects if isinstance(e, SendClosed)]


def in_one_pass() -> tuple[Driven, Batch]:
    """A stage whose second pass has two segments of a session."""
    last = stage()
    last.feed(Received(DRAFT, replace(opening(1, session=1), coalesce=True)))
    (first,) = passes(last.feed(Received(DRAFT, segment(0, {0: -1}, session=1))))
    last.feed(Received(DRAFT, segment(1, {1: 0, 2: 0}, session=1)))
    last.feed(Received(DRAFT, segment(2, {3: 2}, session=1)))
    (batch,) = [e.job for e in last.feed(done(first, (5,))) if isinstance(e, Compute)]
    assert isinstance(batch, Batch)
    return last, batch


def test_segments_of_one_session_share_a_pass_and_have_a_verdict_each() -> None:
    """One pass in the closed, and the first stage says that it was one turn."""
    last, batch = in_one_pass()
    assert [one.segment for one in batch.passes] == [1, 2]
    # Node 2 has the slot before node 3's, which sees it.
    assert batch.passes[1].rows[0].visible == (2, 3)
    verdicts = sent(last.feed(done(batch, ((6, 7), (8,)))), Verdict)
    assert [(v.ids, v.tokens, v.batch_remaining, v.pass_number) for v in verdicts] == [
        ((1, 2), (6, 7), 1, 2),
        ((3,), (8,), 0, 2),
    ]
    (closed,) = reports(last.feed(Received(DRAFT, Close(SessionId(1)))))
    assert (closed.passes, closed.rows) == (2, 4)


def test_a_session_that_ends_in_a_pass_of_two_of_its_segments_accounts_for_both() -> None:
    last, batch = in_one_pass()
    assert reports(last.feed(Received(DRAFT, Close(SessionId(1))))) == []
    (closed,) = reports(last.feed(done(batch, ((6, 7), (8,)))))
    assert (closed.passes, closed.rows) == (2, 4)
    assert set(last.state.sessions) == {0}
    assert last.state.closing == {}


def test_sessions_that_wait_share_the_next_pass_and_go_on_together() -> None:
    last = stage()
    last.feed(*(Received(DRAFT, opening(1, session)) for session in (1, 2)))
    (first,) = passes(last.feed(Received(DRAFT, segment(0, {0: -1}))))
    for session in (1, 2):
        last.feed(Received(DRAFT, segment(0, {0: -1}, session=session)))
    effects = last.feed(done(first, (5,)))
    (batch,) = [e.job for e in effects if isinstance(e, Compute)]
    assert isinstance(batch, Batch)
    assert [one.session for one in batch.passes] == [1, 2]
    verdicts = sent(last.feed(done(batch, ((6,), (7,)))), Verdict)
    assert [(v.session, v.tokens, v.batch_remaining) for v in verdicts] == [
        (1, (6,), 1),
        (2, (7,), 0),
    ]


def test_an_idle_stage_waits_for_all_of_a_pass() -> None:
    last = stage()
    last.feed(Received(DRAFT, opening(1, session=1)))
    one = segment(0, {0: -1})
    assert passes(last.feed(Received(DRAFT, _with_more(one, 1)))) == []
    effects = last.feed(Received(DRAFT, segment(0, {0: -1}, session=1)))
    (job,) = [e.job for e in effects if isinstance(e, Compute)]
    assert isinstance(job, Batch)


def test_results_sent_together_say_how_many_follow() -> None:
    names = [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1)]
    found = with_batch_remaining([segment(n, {5: 4}, session=s) for s, n in names])
    assert [(s.session, s.segment, s.batch_remaining) for s in found] == [
        (0, 0, 2),
        (1, 0, 1),
        (2, 0, 0),
        (0, 1, 1),
        (2, 1, 0),
    ]


def test_the_draft_node_receives_pass_times() -> None:
    last = stage()
    reported = []
    for number in range(20):
        last.feed(Received(DRAFT, segment(number, {number: number - 1})))
        job = last.state.running.job
        reported += [e for e in last.feed(done(job, (5,))) if isinstance(e, Send)]
    times = [e.message for e in reported if isinstance(e.message, PassTimes)]
    assert times == [PassTimes(Rank(1), (1.0,), (0.5,))]


def _with_more(message: Segment, more: int) -> Segment:
    return Segment(
        message.session,
        message.segment,
        message.applied,
        message.ids,
        message.parents,
        message.tokens,
        batch_remaining=more,
    )
