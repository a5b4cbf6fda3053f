"""The draft machine asks its own device for the trees of all sessions at once, and only when it is
free."""

from __future__ import annotations

from typing import Any

import pytest

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.jobs import DraftBatch, Release, draft_jobs
from asyncspec.core.machine import Cancelled, Compute, Computed, Submitted
from asyncspec.core.sampling import Sampling
from asyncspec.policy.flow.memory import FlowMemory
from asyncspec_protocol.messages import Expand, Expanded, Segment
from cluster import ask
from nodes.machine_driver import Driven, abandoned, draft, sent
from nodes.test_draft import verdict

TREE: dict[str, Any] = {"parents": (-1,), "tokens": (7,), "scores": (-0.1,)}

MAX_TOKENS = PARAMETERS.max_draft_tokens


def jobs(effects: list[Any]) -> list[Any]:
    return [e.job for e in effects if isinstance(e, Compute)]


def answer(job: Expand, **tree: Any) -> Expanded:
    nothing: dict[str, Any] = {"parents": (), "tokens": (), "scores": ()}
    base = job.base + len(job.committed)
    return Expanded(job.session, job.version, base, **{**nothing, **tree})


def done(driven: Driven, job: Any, seconds: float = 0.1, **tree: Any) -> list[Any]:
    """The device has done a job, and every tree has grown the same."""
    grown = tuple(answer(one, **tree) for one in draft_jobs(job))
    result = grown if isinstance(job, DraftBatch) else grown[0]
    return driven.feed(Computed(job, result, seconds))


def submit(driven: Driven, number: int, prompt: tuple[int, ...], **changes: Any) -> list[Any]:
    fields: dict[str, Any] = {"prompt": prompt, "max_new_tokens": 20, "policy": "pruned"}
    return driven.feed(Submitted(ask(number, **{**fields, **changes})))


def three() -> tuple[Driven, Any]:
    """Three sessions: the first one's prompt is being read, the others had to wait."""
    driven = draft()
    (first,) = jobs(submit(driven, 0, (1,)))
    assert isinstance(first, Expand)
    for number in (1, 2):
        assert jobs(submit(driven, number, (1, 2))) == []
    return driven, first


def test_requests_wait_for_a_busy_source_and_form_one_batch() -> None:
    driven, first = three()
    assert jobs(driven.feed(verdict(0, {0: 5}))) == [], "a tree is wanted, but not before its turn"
    (both,) = jobs(done(driven, first))
    assert isinstance(both, DraftBatch)
    # Who has waited longest comes first, and the tree is asked for as it is wanted by now.
    assert [(job.session, job.committed, job.count > 0) for job in both.jobs] == [
        (1, (1, 2), False),
        (2, (1, 2), False),
        (0, (5,), True),
    ]


def test_a_call_costs_flow_all_the_time_until_the_answer() -> None:
    """Also what a share of a processor makes the device wait, and what the node does meanwhile: a
    node of .4 cores took 13 ms for a level that it computed in 8, and 23 for two."""
    driven = draft()
    (first,) = jobs(submit(driven, 0, (1,), policy="flow"))
    done(driven, first, 0.1, **TREE)
    memory = driven.state.memories["flow", Sampling().kind]
    assert isinstance(memory, FlowMemory)
    assert memory.level is not None
    assert memory.level.at(1) == pytest.approx(0.1 / first.depth)
    assert memory.level.call == pytest.approx(0.9), "a second an input"


def test_the_trees_of_a_batch_are_merged_and_its_time_is_shared() -> None:
    driven, first = three()
    driven.feed(verdict(0, {0: 5}))
    (both,) = jobs(done(driven, first, 0.25))
    effects = done(driven, both, 0.75, **TREE)
    assert [(m.session, m.tokens) for m in sent(effects, Segment)] == [(0, (5, 7))]
    counters = [driven.state.sessions[i].counters for i in range(3)]
    assert [one.draft_seconds for one in counters] == [0.5, 0.25, 0.25]
    assert [one.draft_passes for one in counters] == [2, 1, 1]


def test_one_of_a_batch_is_given_up_and_the_others_are_not() -> None:
    driven, first = three()
    driven.feed(verdict(0, {0: 5}))
    (both,) = jobs(done(driven, first))
    effects = driven.feed(Cancelled(0))
    assert abandoned(effects) == [both.jobs[2]]
    assert jobs(effects) == [Release(0)], "and the source is not free yet"
    assert jobs(done(driven, both, **TREE)) == []
    assert set(driven.state.sessions) == {1, 2}
    assert all(session.draft_request is None for session in driven.state.sessions.values())


def test_a_session_that_opens_while_the_last_ones_tree_still_grows_waits_for_the_device() -> None:
    driven = draft()
    (first,) = jobs(submit(driven, 0, (1,)))
    driven.feed(Cancelled(0))
    assert jobs(submit(driven, 1, (1, 2))) == []
    (second,) = jobs(done(driven, first))
    assert (second.session, second.committed) == (1, (1, 2))


def test_a_long_prompt_is_read_in_pieces_and_others_have_their_turn_in_between() -> None:
    driven = draft()
    long = tuple(range(2 * MAX_TOKENS + 3))
    (piece,) = jobs(submit(driven, 0, long))
    assert (piece.base, piece.committed, piece.count) == (0, long[:MAX_TOKENS], 0)
    submit(driven, 1, (8, 9))
    (both,) = jobs(done(driven, piece))
    assert [(job.base, len(job.committed)) for job in both.jobs] == [
        (0, 2),
        (MAX_TOKENS, MAX_TOKENS),
    ]
    (rest,) = jobs(done(driven, both))
    assert (rest.session, rest.base, rest.committed) == (0, 2 * MAX_TOKENS, long[2 * MAX_TOKENS :])
    assert jobs(done(driven, rest)) == []


def test_no_tree_is_asked_for_before_the_prompt_is_read() -> None:
    driven = draft()
    long = tuple(range(MAX_TOKENS + 1))
    (piece,) = jobs(submit(driven, 0, long))
    last = driven.state.sessions[0].next_segment - 1
    driven.feed(verdict(last, {MAX_TOKENS: 5}))
    (rest,) = jobs(done(driven, piece))
    assert (rest.base, rest.committed, rest.count > 0) == (MAX_TOKENS, (MAX_TOKENS, 5), True)


def test_a_batch_is_bounded_in_rows_and_no_session_is_left_out_twice() -> None:
    count = PARAMETERS.max_draft_rows // MAX_TOKENS + 1
    driven = draft()
    (first,) = jobs(submit(driven, 0, (1,)))
    for number in range(1, count + 2):
        submit(driven, number, tuple(range(2 * MAX_TOKENS)))
    turns: list[list[int]] = []
    (job,) = jobs(done(driven, first))
    while job is not None:
        assert sum(len(one.committed) for one in draft_jobs(job)) <= PARAMETERS.max_draft_rows
        turns.append([one.session for one in draft_jobs(job)])
        job = next(iter(jobs(done(driven, job))), None)
    # All have read the first half before anybody goes on with the second.
    order = [session for turn in turns for session in turn]
    assert order == [*range(1, len(order) // 2 + 1)] * 2


def test_a_source_that_remembers_is_told_whose_answer_it_is() -> None:
    """With the first request of a session alone, and others are not told."""
    driven = draft(source_remembers=True)
    (first,) = jobs(submit(driven, 0, (1, 2, 3), tenant="ann"))
    assert (first.tenant, first.prompt_length) == ("ann", 3)
    driven.feed(verdict(0, {2: 5}))
    (then,) = jobs(done(driven, first))
    assert (then.base, then.tenant, then.prompt_length) == (3, "", 0)
    (first,) = jobs(submit(draft(), 0, (1, 2, 3), tenant="ann"))
    assert (first.tenant, first.prompt_length) == ("", 0)
