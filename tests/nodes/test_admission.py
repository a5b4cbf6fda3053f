"""Requests are admitted when every stage has room for the most they can come to."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core.kv_slots import BLOCK
from asyncspec.core.machine import Finish, LinkUp, Received, Submitted
from asyncspec.policy.registry import POLICIES
from asyncspec_nodes.http.streaming import PromptParameter, error_of
from asyncspec_nodes.roles.draft.admission import refusal, slots_total, slots_used
from asyncspec_nodes.roles.draft.memory_bound import MemoryBound
from asyncspec_nodes.roles.draft.session import slots_needed
from asyncspec_protocol.clients import TOO_LARGE
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import Finished, Open, Ready
from cluster import Cluster, ask
from costs import UnitCosts
from effort import examples
from laws import SMALL
from nodes.machine_driver import Driven, draft, sent


def room(*slots: int) -> Driven:
    """A draft node whose stages have so many cache slots."""
    driven = draft(stages=len(slots))
    for rank, count in enumerate(slots, 1):
        driven.feed(Received(Rank(rank), Ready(Rank(rank), True, count)))
    return driven


@pytest.mark.parametrize(
    ("policy", "stages", "slots"),
    [
        ("autoregressive", 4, 100),
        ("chain", 4, 120),
        ("flowspec", 4, 580),
        ("specpipe", 4, 300),
        ("pipedec:width=4096", 4, 100 + 2 * 4096),
    ],
)
def test_a_session_takes_its_prompt_its_answer_and_its_policys_tree(
    policy: str, stages: int, slots: int
) -> None:
    request = ask(prompt=(1,) * 40, max_new_tokens=60, policy=policy)
    blocks = -(-slots // BLOCK)
    assert slots_needed(request, POLICIES[policy], stages) == blocks * BLOCK


def test_stages_receive_what_was_admitted() -> None:
    (opened,) = sent(room(0, 0).feed(Submitted(ask(1))), Open)
    assert (opened.capacity, opened.max_tree_nodes) == (6 + 24, SMALL["flowspec"].max_tree_nodes(2))


def test_the_smallest_stage_decides_and_order_is_kept() -> None:
    driven = room(0, 448, 2000)
    small, large = ask(1, max_new_tokens=20), ask(2, max_new_tokens=400)
    policy = SMALL["flowspec"]
    assert slots_needed(small, policy, 3) == 64
    assert slots_needed(large, policy, 3) == 448
    opened = sent(driven.feed(Submitted(small), Submitted(large), Submitted(ask(3))), Open)
    # The large one waits for all of the room, and the small one behind it for the large one.
    assert len(opened) == 1
    assert [job.request.request for job in driven.state.backlog] == [2, 3]
    assert slots_used(driven.state) == 64


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    driven = room(320)
    effects = driven.feed(Submitted(ask(1, max_new_tokens=400)), Submitted(ask(2)))
    (finish,) = [e for e in effects if isinstance(e, Finish)]
    assert (finish.request, finish.reason) == (1, "error")
    assert "448 cache slots" in finish.detail
    assert "the smallest stage has 320" in finish.detail
    assert [m.session for m in sent(effects, Open)] == [0]
    # A client of the API that gets a 503 asks for the same again by itself.
    end = Finished(finish.request, finish.reason, finish.detail, finish.stats, finish.code)
    error = error_of(end, PromptParameter("prompt"))
    assert error is not None
    assert (error.status, error.code, error.headers) == (400, "too_large", {})


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=4), st.integers(1, 4000))
def test_a_request_fits_alone_or_never(slots: list[int], tokens: int) -> None:
    driven = room(*slots)
    request = ask(1, max_new_tokens=tokens)
    bound = slots_total(driven.state)
    needed = slots_needed(request, SMALL["flowspec"], len(slots))
    assert needed % BLOCK == 0
    assert bool(refusal(driven.state, request)) == (bound is not None and needed > bound)


def test_requests_wait_until_the_token_source_has_room() -> None:
    """Only those that draft; a plain one behind them keeps its place in the queue."""
    driven = draft(slots=130)
    asked = [ask(i, max_new_tokens=20) for i in (1, 2, 3)]
    plain = ask(4, max_new_tokens=20, policy="autoregressive")
    opened = sent(driven.feed(*map(Submitted, asked), Submitted(plain)), Open)
    assert len(opened) == 2
    assert [job.request.request for job in driven.state.backlog] == [3, 4]
    driven = draft(slots=64)
    opened = sent(driven.feed(Submitted(asked[0]), Submitted(plain)), Open)
    assert len(opened) == 2


def test_a_source_of_its_own_says_for_how_much_it_has_room() -> None:
    driven = draft(source=Rank(2))
    driven.feed(LinkUp(Rank(2)), Received(Rank(2), Ready(Rank(2), True, 64)))
    opened = sent(driven.feed(Submitted(ask(1, max_new_tokens=20)), Submitted(ask(2))), Open)
    assert len(opened) == 1
    assert slots_total(driven.state) is None


def test_a_request_that_can_never_fit_the_source_is_refused() -> None:
    driven = draft(slots=320)
    large = ask(1, max_new_tokens=400)
    (finish,) = [e for e in driven.feed(Submitted(large)) if isinstance(e, Finish)]
    assert finish.reason == "error"
    assert "448 slots of the token source's caches, which have 320" in finish.detail
    assert "draft_mib" in finish.detail
    assert finish.code == TOO_LARGE
    plain = replace(large, request=2, policy="autoregressive")
    assert sent(driven.feed(Submitted(plain)), Open)


def test_a_request_without_a_bound_gets_what_the_caches_hold() -> None:
    driven = room(0, 448)
    policy = SMALL["flowspec"]
    for number, asked in enumerate((2**20, 20)):
        request = ask(number, max_new_tokens=asked, unbounded=True)
        (opened,) = sent(driven.feed(Submitted(request)), Open)
        fitted = replace(request, max_new_tokens=opened.capacity - len(request.prompt))
        assert slots_needed(fitted, policy, 2) == min(448, slots_needed(request, policy, 2))
        driven = room(0, 448)


def test_an_answer_ends_before_it_is_as_long_as_what_ended_a_stage() -> None:
    driven = room(0)
    driven.state = replace(driven.state, memory_bound=MemoryBound(tokens=30, stage=Rank(1)))
    longest = driven.state.memory_bound.most_tokens
    (opened,) = sent(driven.feed(Submitted(ask(1, prompt=(1,) * 10, max_new_tokens=50))), Open)
    assert longest == 29
    assert opened.capacity == longest


@settings(max_examples=examples(100, quick=24))
@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=8),
    st.integers(1, 3),
    st.integers(0, 2),
)
def test_all_are_served_however_little_room_there_is(
    tokens: list[int], stages: int, extra: int
) -> None:
    """With room for the largest alone, or for a little more, everybody gets the whole text."""
    requests = [ask(i, prompt=(i,), max_new_tokens=n) for i, n in enumerate(tokens)]
    policy = POLICIES["flowspec"]
    needed = max(slots_needed(request, policy, stages) for request in requests)
    cluster = Cluster(UnitCosts(), stages=stages, slots=needed + extra * BLOCK, max_sessions=8)
    for request in requests:
        cluster.submit(request)
    cluster.world.run(until=1e6)
    for request in requests:
        assert tuple(cluster.world.tokens[request.request]) == cluster.expected(request)
    assert slots_used(cluster.state(0)) == 0
