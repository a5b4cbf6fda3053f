"""What is over stays in the books until every stage has freed it: the draft node by hand."""

from __future__ import annotations

from asyncspec.core.kv_slots import BLOCK
from asyncspec.core.machine import Cancelled, LinkDown, LinkUp, Received, Submitted, TimerFired
from asyncspec_nodes.roles.draft.admission import slots_used
from asyncspec_nodes.roles.draft.lifecycle import stats_timer
from asyncspec_protocol.ids import Rank, SessionId
from asyncspec_protocol.messages import Close, Closed, Floor, Open, Ready, Segment, Verdict
from cluster import ask
from nodes.machine_driver import Driven, draft, sent

V1, V2 = Rank(1), Rank(2)


def ready(rank: Rank, floor: int, *, up: bool = True, slots: int = BLOCK) -> Received:
    return Received(rank, Ready(rank, up, slots, SessionId(-1), SessionId(floor)))


def room(stages: int = 2, slots: int = BLOCK) -> Driven:
    """A draft node whose stages have so much room, and answer to a ``Floor``."""
    driven = draft(stages, min_common_prefix=1)
    driven.feed(*(ready(Rank(rank), 0, slots=slots) for rank in range(1, stages + 1)))
    return driven


def small(number: int, length: int = 3) -> Submitted:
    return Submitted(
        ask(number, prompt=(number,) * length, max_new_tokens=9, policy="autoregressive")
    )


def closed(rank: Rank, session: int, *, kept: bool = False) -> Received:
    return Received(rank, Closed(SessionId(session), rank, 0, 0, 0, 0.0, 0, kept))


def test_an_end_without_all_statistics_frees_nothing() -> None:
    driven = room()
    driven.feed(small(1), small(2), Cancelled(1))
    driven.feed(TimerFired(stats_timer(SessionId(0))))
    assert not driven.state.finishing
    assert not driven.state.sessions
    assert slots_used(driven.state) == BLOCK
    assert sent(driven.feed(closed(V1, 0)), Open) == []
    assert [m.session for m in sent(driven.feed(closed(V2, 0)), Open)] == [1]
    assert not driven.state.pending_releases


def test_a_reconnected_stage_has_freed_sessions_below_the_floor() -> None:
    driven = room()
    driven.feed(small(1), LinkDown(V2), LinkUp(V2))
    (floor, _) = sent(driven.feed(ready(V2, 0)), Floor)
    assert floor.first == 1
    # The old session may be anywhere: its ``Open`` was under way.
    assert sent(driven.feed(closed(V1, 0)), Open) == []
    assert sent(driven.feed(ready(V2, 0)), Open) == []
    assert [m.session for m in sent(driven.feed(ready(V2, 1)), Open)] == [1]


def test_statistics_that_keep_the_prompt_free_the_rest_alone() -> None:
    """The prompt was given up before the account came that says that it is kept."""
    driven = room(stages=1, slots=2 * BLOCK)
    (segment,) = sent(driven.feed(small(1, 70 - BLOCK)), Segment)
    verdict = Verdict(segment.session, segment.segment, segment.applied, segment.ids[-1:], (5,))
    driven.feed(Received(V1, verdict))
    assert sent(driven.feed(Cancelled(1)), Close) == [Close(SessionId(0), True, 6)]
    assert slots_used(driven.state) == 2 * BLOCK
    assert sent(driven.feed(small(2, 100)), Close) == [Close(SessionId(0))]
    assert sent(driven.feed(closed(V1, 0, kept=True)), Open) == []
    assert slots_used(driven.state) == BLOCK
    assert [m.session for m in sent(driven.feed(closed(V1, 0)), Open)] == [1]


def test_a_stage_that_reports_no_free_slots_delays_no_request() -> None:
    """One from before there were such answers."""
    driven = draft(stages=2)
    driven.feed(*(Received(rank, Ready(rank, True, BLOCK)) for rank in (V1, V2)))
    assert len(sent(driven.feed(small(1), small(2), Cancelled(1)), Open)) == 2


def test_an_answer_to_a_floor_from_before_a_break_says_nothing_of_that() -> None:
    """A stage tells of a break that was heard of already, behind an answer that was under way."""
    driven = room(slots=0)
    driven.feed(small(1), LinkDown(V2), LinkUp(V2), ready(V2, 1, slots=0))
    assert driven.state.sessions
    driven.feed(ready(V1, 0, slots=0), ready(V1, 0, up=False, slots=0))
    (job,) = driven.state.backlog
    assert job.counters.breaks == 1
    assert not driven.state.break_echoes
