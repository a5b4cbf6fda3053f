"""Prompts that begin common_prefix_length are read once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core.feature_log import FeatureLog
from asyncspec.core.kept_states import kept_state
from asyncspec.core.kv_slots import BLOCK
from asyncspec.core.machine import (
    Cancelled,
    Compute,
    Effect,
    Finish,
    Input,
    Received,
    Request,
    Submitted,
)
from asyncspec.core.sampling import Sampling
from asyncspec.plugins.toy.model import ToyModel
from asyncspec.policy.registry import POLICIES
from asyncspec_nodes.roles.draft import prefix_cache
from asyncspec_nodes.roles.draft.prefix_cache import common_prefix_length
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import DRAFT, NodeId, Rank, SegmentId, SessionId, Version
from asyncspec_protocol.messages import FINAL, Credit, Message, Open, Verdict
from cluster import Cluster, ask
from costs import UnitCosts
from effort import examples
from laws import FEATURES, SMALL, Shaken, watch_invariants
from nodes.machine_driver import draft

LONG = tuple(i % 7 for i in range(90))


def served(cluster: Cluster, *requests: Request) -> list[dict[str, float]]:
    """One after the other; texts are checked."""
    return [stats for request in requests for stats in served_together(cluster, request)]


def served_together(cluster: Cluster, *requests: Request) -> list[dict[str, float]]:
    """All at once; texts are checked."""
    for request in requests:
        cluster.submit(request)
    cluster.world.run(until=1e9)
    for request in requests:
        expected = cluster.expected(request)[len(request.given) :]
        assert tuple(cluster.world.tokens[request.request]) == expected
    return [cluster.world.finished[request.request].stats for request in requests]


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40))
def test_the_longest_common_beginning(one: list[int], other: list[int]) -> None:
    length = common_prefix_length(one, other)
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]


@given(
    st.lists(
        st.tuples(st.integers(0, 90), st.lists(st.integers(0, 6), min_size=1, max_size=30)),
        min_size=2,
        max_size=5,
    ),
    st.sampled_from(((), (FINAL,), (1, 3))),
    st.integers(1, 3),
)
def test_a_common_prefix_is_not_computed_again(
    parts: list[tuple[int, list[int]]], features: tuple[int, ...], stages: int
) -> None:
    """Every stage has a pass over just those rows of a prompt that it did not have."""
    cluster = Cluster(UnitCosts(), stages=stages, min_common_prefix=8, features=features)
    prompts = [LONG[:length] + tuple(rest) for length, rest in parts]
    requests = [
        ask(i, prompt=p, max_new_tokens=5, policy="autoregressive" if not features else "flowspec")
        for i, p in enumerate(prompts)
    ]
    held: list[tuple[int, ...]] = []
    for i, stats in enumerate(served(cluster, *requests)):
        best = max((common_prefix_length(p, prompts[i][:-1]) for p in held), default=0)
        held.append((prompts[i] + tuple(cluster.world.tokens[i]))[:-1])
        assert stats["shared_tokens"] in (0, *range(8, best + 1))
        if i and best >= 8 and i <= 3:  # so many prompts are kept here
            assert stats["shared_tokens"] == best
        read = stages * (len(prompts[i]) - 1 - stats["shared_tokens"])
        assert stats["rows"] >= read
        if not features:
            assert stats["rows"] == read + stages * 5


def test_a_prompt_read_without_features_is_no_beginning_for_one_that_needs_them() -> None:
    """The token source would miss those of the tokens that nothing is sent of."""
    cluster = Cluster(UnitCosts(), min_common_prefix=8, features=(FINAL,))
    policies = ("autoregressive", "flowspec", "flowspec", "autoregressive", "flowspec")
    prompts = (LONG, LONG, LONG, (*LONG, 5, 5), LONG)
    asked = [
        ask(n, prompt=prompt, policy=policy)
        for n, (prompt, policy) in enumerate(zip(prompts, policies, strict=True))
    ]
    shared = [stats["shared_tokens"] for stats in served(cluster, *asked)]
    # A longer prompt without features takes the place of none that has them.
    assert shared == [0, 0, len(LONG) - 1, len(LONG), len(LONG) - 1]


def test_a_session_that_runs_is_a_beginning_too() -> None:
    cluster = Cluster(UnitCosts(), min_common_prefix=8)
    long, late = ask(0, prompt=LONG, max_new_tokens=200), ask(1, prompt=(*LONG, 3, 4))
    cluster.submit(long)
    cluster.world.at(80.0, lambda: cluster.submit(late))
    cluster.world.run(until=1e9)
    for request in (long, late):
        assert tuple(cluster.world.tokens[request.request]) == cluster.expected(request)
    assert cluster.world.finished[1].stats["shared_tokens"] == len(LONG) - 1


def test_what_is_found_again_after_a_break_is_not_counted_again() -> None:
    cluster = Cluster(UnitCosts(), stages=2, min_common_prefix=8)
    asked = [ask(n, prompt=(*LONG, n, 2, 3), max_new_tokens=60) for n in (1, 2)]

    def lose() -> None:
        cluster.world.restart(Rank(2), cluster.stage(Rank(2)))
        cluster.world.at(cluster.world.now + 1, cluster.connect_all)

    for when in (45.0, 95.0):
        cluster.world.at(when, lose)
    first, second = served_together(cluster, *asked)
    assert (first["sessions"], second["sessions"]) == (3, 3)
    assert (first["shared_tokens"], second["shared_tokens"]) == (0, len(LONG))
    for stats in (first, second):
        read = 93 + 60 - 1 - stats["shared_tokens"]
        assert stats["wasted_rows"] == stats["rows"] - 2 * read


def test_what_is_found_of_given_tokens_is_no_part_of_the_prompt() -> None:
    cluster = Cluster(UnitCosts(), stages=2, min_common_prefix=8)
    answer = cluster.expected(ask(prompt=(1, 2, 3), max_new_tokens=40))
    asked = [
        ask(n, prompt=(1, 2, 3), max_new_tokens=40, given=answer[:given])
        for n, given in enumerate((20, 30))
    ]
    stats = served(cluster, *asked)[1]
    assert stats["shared_tokens"] == 3
    assert stats["wasted_rows"] == stats["rows"] - 2 * (3 + 40 - 1 - (3 + 29))


def test_several_answers_to_one_prompt_read_it_once() -> None:
    cluster = Cluster(UnitCosts(), min_common_prefix=8, max_sessions=8, prefill_rows=10)
    requests = [ask(i, prompt=LONG, max_new_tokens=9) for i in range(4)]
    for request in (*requests, ask(9, prompt=(1, 2))):
        cluster.submit(request)
    early: set[int] = set()

    def look() -> None:
        early.update(s.request.request for s in cluster.state(0).sessions.values())

    cluster.world.at(2.0, look)
    cluster.world.run(until=1e9)
    assert early == {0, 9}  # others do not wait for them
    for request in requests:
        assert tuple(cluster.world.tokens[request.request]) == cluster.expected(request)
        shared = cluster.world.finished[request.request].stats["shared_tokens"]
        assert shared == (len(LONG) - 1 if request.request else 0)


def test_the_prefix_a_request_waits_for_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at every input: prompts are long, and many may wait for one."""
    looks = 0

    def looking(one: tuple[int, ...], other: tuple[int, ...]) -> int:
        nonlocal looks
        looks += 1
        return common_prefix_length(one, other)

    monkeypatch.setattr(prefix_cache, "common_prefix_length", looking)
    driven = draft(credit=1)
    prompt = tuple(range(1, 400))
    driven.feed(*(Submitted(ask(i, prompt=prompt, policy="autoregressive")) for i in range(3)))
    assert len(driven.state.backlog) == 2
    before = looks
    driven.feed(*(Received(Rank(1), Credit(limit)) for limit in range(2, 7)))
    assert len(driven.state.backlog) == 2
    driven.feed(Submitted(ask(3, prompt=prompt[1:])))
    assert len(driven.state.sessions) == 2
    assert looks == before


class SlowPipeline(UnitCosts, frozen=True):
    """What goes from stage to stage is overtaken by what goes straight to a stage."""

    def link(self, source: Rank, target: Rank, message: Message) -> float:
        return 9.0 if 0 < source < target else 0.5


@pytest.mark.parametrize("moment", range(0, 60, 2))
def test_an_end_does_not_overtake_a_beginning(moment: int) -> None:
    """A prompt stays until every stage has opened the sessions that begin like it."""
    cluster = Cluster(SlowPipeline(), stages=3, min_common_prefix=8)
    covered = [ask(i, prompt=LONG[:80], max_new_tokens=2) for i in (1, 2, 3)]
    for delay, request in enumerate((ask(0, prompt=LONG, max_new_tokens=3), *covered)):
        cluster.world.at(100.0 + delay * moment, cluster.submit, request)
    cluster.world.run(until=1e6)
    for request in covered:
        assert tuple(cluster.world.tokens[request.request]) == cluster.expected(request)
    kept = cluster.state(0).cached_prompts
    assert sorted(len(one.prefix) for one in kept) == [80 + 2, len(LONG) + 3]
    assert not any(one.unused for one in kept)


def test_a_prompt_that_a_session_is_about_to_begin_with_makes_no_room() -> None:
    """Its end would overtake the beginning on the later stages, which would not know it."""
    cluster = Cluster(SlowPipeline(), stages=3, min_common_prefix=8, slots=4 * BLOCK)
    small = {"max_new_tokens": 3, "policy": "autoregressive"}
    served(cluster, ask(0, prompt=LONG, **small))
    again, other = ask(1, prompt=LONG, **small), ask(2, prompt=LONG[::-1], **small)
    stats, _ = served_together(cluster, again, other)
    assert stats["shared_tokens"] == len(LONG) - 1


@settings(max_examples=examples(200, quick=80))
@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.sampled_from(("", "one", "other")), st.integers(0, 60)),
        min_size=2,
        max_size=6,
    ),
    st.integers(1, 3),
    st.integers(1, 20),
)
def test_a_tenant_reuses_its_own_prompts_only(
    asked: list[tuple[int, str, int]], max_sessions: int, prefill_rows: int
) -> None:
    """What is open, what is being read and what is kept: of another tenant none of it is reused."""
    cluster = Cluster(
        UnitCosts(), min_common_prefix=8, max_sessions=max_sessions, prefill_rows=prefill_rows
    )
    watch_invariants(cluster)
    requests = [
        ask(i, prompt=(*LONG[:40], end), max_new_tokens=4, tenant=tenant)
        for i, (end, tenant, _) in enumerate(asked)
    ]
    for request, (_, _, when) in zip(requests, asked, strict=True):
        cluster.world.at(when, cluster.submit, request)
    cluster.world.run(until=1e9)
    alone = Counter(request.tenant for request in requests)
    for request in requests:
        assert tuple(cluster.world.tokens[request.request]) == cluster.expected(request)
        shared = cluster.world.finished[request.request].stats["shared_tokens"]
        assert alone[request.tenant] > 1 or shared == 0


def test_prompts_of_each_tenant_are_kept() -> None:
    """Another tenant's prompt that covers one's own is no reason to give that up."""
    cluster = Cluster(UnitCosts(), min_common_prefix=8)
    asked = [ask(i, prompt=LONG, max_new_tokens=2, tenant="ab"[i % 2]) for i in range(4)]
    stats = served(cluster, *asked)
    assert [one["shared_tokens"] for one in stats] == [0, 0, len(LONG) - 1, len(LONG) - 1]


def test_no_request_waits_for_another_tenants_prompt() -> None:
    driven = draft(credit=1)
    prompt = tuple(range(1, 400))
    for number, tenant in enumerate(("one", "other")):
        driven.feed(Submitted(ask(number, prompt=prompt, tenant=tenant)))
    assert len(driven.state.sessions) == 2
    assert not driven.state.backlog


def test_penalties_read_the_whole_prompt() -> None:
    cluster = Cluster(UnitCosts(), min_common_prefix=8)
    plain = ask(0, prompt=LONG)
    sampling = Sampling(repetition_penalty=1.5)
    stats = served(cluster, plain, replace(plain, request=1, sampling=sampling))
    assert [one["shared_tokens"] for one in stats] == [0, 0]


def test_a_prompt_that_is_kept_makes_room_for_a_request_that_waits() -> None:
    slots, tree = 256, POLICIES["chain"].max_tree_nodes(3)
    cluster = Cluster(UnitCosts(), stages=3, min_common_prefix=8, slots=slots)
    large = ask(1, prompt=(1, 2), max_new_tokens=slots - tree - 2, policy="chain")
    served(cluster, ask(0, prompt=LONG, max_new_tokens=4, policy="chain"), large)
    assert [one.prefix[:2] for one in cluster.state(0).cached_prompts] == [(1, 2)]
    assert all(len(cluster.state(rank).cached_prompts) == 1 for rank in (1, 2, 3))


def test_a_prompt_is_not_given_up_where_that_makes_no_room() -> None:
    """A request that would have to wait all the same leaves others what they begin with."""
    cluster = Cluster(UnitCosts(), stages=3, min_common_prefix=8, slots=560)
    first, last = (ask(i, prompt=LONG + (3,) * i, max_new_tokens=4, policy="chain") for i in (0, 3))
    served(cluster, first)
    running = ask(1, prompt=(1, 2), max_new_tokens=300, policy="chain")
    large = ask(2, prompt=(3, 4, 5), max_new_tokens=200, policy="chain")
    cluster.submit(running)
    # So soon that too little of it is there to be kept.
    cluster.world.at(cluster.world.now + 6.0, cluster.world.feed, DRAFT, Cancelled(1))
    stats = served_together(cluster, large, last)
    assert [one["shared_tokens"] for one in stats] == [0, len(LONG)]


def test_no_request_waits_for_a_long_prompt_to_share_a_few_tokens() -> None:
    """What somebody else is reading is waited for only where that is shorter than reading it."""
    cluster = Cluster(UnitCosts(), min_common_prefix=8, prefill_rows=10)
    system = LONG[:20]
    cluster.submit(ask(0, prompt=system + LONG * 20, max_new_tokens=2, policy="autoregressive"))
    short = ask(1, prompt=(*system, 3, 4), max_new_tokens=2, policy="autoregressive")
    cluster.submit(short)
    ends: dict[int, float] = {}

    def watch(rank: Rank, event: Input, effects: tuple[Effect, ...]) -> None:
        ends.update({e.request: cluster.world.now for e in effects if isinstance(e, Finish)})

    cluster.world.watch = watch
    cluster.world.run(until=1e9)
    assert tuple(cluster.world.tokens[1]) == cluster.expected(short)
    assert ends[1] < 30.0 < 180.0 < ends[0]


turns = st.lists(
    st.tuples(
        # New tokens of the user, the answer's limit, and tokens of its end that the next prompt
        # renders otherwise.
        st.lists(st.integers(0, 6), min_size=1, max_size=12),
        st.integers(1, 30),
        st.integers(0, 8),
    ),
    min_size=2,
    max_size=6,
)


@settings(max_examples=examples(150, quick=30))
@given(
    turns,
    st.sampled_from(sorted(SMALL)),
    st.integers(1, 3),
    st.lists(st.integers(0, 6)),
    st.sampled_from(FEATURES),
    st.booleans(),
)
def test_the_next_turn_of_a_chat_reads_what_is_new(
    turns: list[tuple[list[int], int, int]],
    policy: str,
    stages: int,
    delays: list[int],
    features: tuple[int, ...],
    apart: bool,
) -> None:
    """An answer's slots are taken over as far as the next prompt goes on with it, whatever trees
    it was computed in and whenever prunes come."""
    cluster = Cluster(
        Shaken([1, *delays]),
        stages=stages,
        min_common_prefix=8,
        policies=SMALL,
        max_sessions=1,
        features=features,
        apart=apart,
    )
    watch_invariants(cluster)
    held: tuple[int, ...] = ()
    earlier = prompt = LONG[:20]
    for number, (user, limit, rendered_otherwise) in enumerate(turns):
        prompt += tuple(user)
        request = ask(number, prompt=prompt, max_new_tokens=limit, policy=policy)
        (stats,) = served(cluster, request)
        expected = common_prefix_length(held, prompt[:-1])
        if features and policy != "autoregressive":
            # What trees of dead nodes came with is not held in memory beyond a bound.
            assert len(earlier) - 1 <= stats["shared_tokens"] <= expected if number else True
        else:
            assert stats["shared_tokens"] == (expected if number else 0)
        earlier = prompt
        answer = tuple(cluster.world.tokens[number])
        # The last token of an answer was never computed.
        held = (prompt + answer)[:-1]
        kept = answer[: len(answer) - rendered_otherwise]
        prompt += kept


def test_a_chat_of_ten_turns_reads_its_prompt_once() -> None:
    """A later turn over 8,000 tokens has a row for each token of the user and of the answer."""
    cluster = Cluster(
        UnitCosts(),
        stages=2,
        model=ToyModel(attention="parent"),
        min_common_prefix=64,
        prefill_rows=64,
    )
    prompt = tuple((i * i) % 7 for i in range(8000))
    for number in range(10):
        request = ask(number, prompt=prompt, max_new_tokens=40, policy="autoregressive")
        (stats,) = served(cluster, request)
        user = 20 if number else 8000
        assert stats["rows"] <= 2 * 1.1 * (user + 40)
        assert stats["shared_tokens"] == (len(prompt) - user - 1 if number else 0)
        prompt += (*cluster.world.tokens[number], *(1, 2, 3, number % 7) * 5)


@pytest.mark.parametrize("apart", [False, True])
def test_features_of_an_answer_are_kept_with_it(apart: bool) -> None:
    """A head that reads the target's features needs those of all tokens that are not read."""
    cluster = Cluster(UnitCosts(), stages=2, min_common_prefix=8, features=(FINAL,), apart=apart)
    first = ask(0, prompt=LONG, max_new_tokens=30, policy="flowspec")
    served(cluster, first)
    answer = tuple(cluster.world.tokens[0])
    (stats,) = served(cluster, replace(first, request=1, prompt=(*LONG, *answer, 1, 2)))
    assert stats["shared_tokens"] == len(LONG) + len(answer) - 1


@given(
    st.integers(1, 5),
    st.integers(0, 60),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), max_size=12),
)
def test_kept_features_hold_no_more_rows_than_are_counted(
    prompt: int, most: int, rounds: list[tuple[int, int]]
) -> None:
    """Each round brings a tensor with the rows of some nodes that live and of some that die."""
    log = FeatureLog.start(prompt, (), 0, most)
    node, sizes, expected = prompt - 1, dict[object, int](), list[tuple[object, int]]()
    for number, (alive, dead) in enumerate(rounds):
        ids = tuple(NodeId(node + i) for i in range(alive + dead))
        chunk = tuple(NodeId(i) for i in range(prompt - 1)) if not number else ()
        verdict = Verdict(
            SessionId(0), SegmentId(number), Version(0), ids, ids, feature_ids=chunk + ids
        )
        log = log.receive(verdict, number, ids).advance(ids[:alive], ())
        sizes[number] = len(chunk) + len(ids)
        expected += [(number, row) for row in range(len(chunk) + alive)]
        node += alive + dead
    kept = [(rows.handle, row) for rows in log.kept for row in rows.rows]
    held = sum(sizes[handle] for handle in {handle for handle, _ in kept})
    assert held <= log.retained <= max(most, sizes.get(0, 0)) + prompt
    # They are those of the first positions, in order.
    assert kept == expected[: len(kept)]


@settings(max_examples=examples(100, quick=25))
@given(turns, st.sampled_from(sorted(SMALL)), st.integers(1, 3), st.lists(st.integers(0, 6)))
def test_with_recurrent_layers_a_chat_goes_on_where_a_state_is_kept(
    turns: list[tuple[list[int], int, int]], policy: str, stages: int, delays: list[int]
) -> None:
    """At the answer's end, or where the template renders that otherwise at a border in the prompt.
    No more sessions and cached prompts are held than there is memory for."""
    cluster = Cluster(
        Shaken([1, *delays]),
        stages=stages,
        min_common_prefix=8,
        policies=SMALL,
        keeps_states=True,
        max_sessions=2,
    )
    watch_invariants(cluster)
    before = cluster.world.watch
    assert before is not None

    def check(rank: Rank, event: Input, effects: tuple[Effect, ...]) -> None:
        before(rank, event, effects)
        if 0 < rank <= cluster.stages:
            state = cluster.state(rank)
            assert state.cached_states.keys() == state.cached_prompts.keys()
            assert len(state.sessions) + len(state.cached_prompts) <= 2

    cluster.world.watch = check
    held: tuple[int, ...] = ()
    prompt, border = LONG, 0
    for number, (user, limit, rendered_otherwise) in enumerate(turns):
        prompt += tuple(user)
        request = ask(number, prompt=prompt, max_new_tokens=limit, policy=policy)
        (stats,) = served(cluster, request)
        common = common_prefix_length(held, prompt[:-1])
        expected = len(held) if common == len(held) else border
        assert stats["shared_tokens"] == expected
        answer = tuple(cluster.world.tokens[number])
        held, border = (prompt + answer)[:-1], kept_state(len(prompt), expected)
        prompt += answer[: len(answer) - rendered_otherwise]


def test_a_stage_refuses_a_beginning_whose_state_is_not_kept() -> None:
    """Its device could not compute it."""
    cluster = Cluster(UnitCosts(), stages=1, min_common_prefix=8, keeps_states=True)
    served(cluster, ask(0, prompt=LONG, max_new_tokens=3))
    (cached,) = cluster.state(0).cached_prompts
    stage = cluster.world.actors[Rank(1)]
    for length in range(1, len(cached.prefix)):
        parent = {"parent_session": cached.session, "common_prefix": length}
        opening = Open(SessionId(9), 99, 110, 0, 0.0, 0, 1.0, max_tree_nodes=0, **parent)
        if length in (64, len(LONG) + 2):
            _, effects = stage.machine.step(stage.state, Received(DRAFT, opening), 0.0)
            assert any(isinstance(effect, Compute) for effect in effects)
        else:
            with pytest.raises(RemoteProtocolError, match="whose state there is not kept"):
                stage.machine.step(stage.state, Received(DRAFT, opening), 0.0)
