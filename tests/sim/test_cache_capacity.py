"""No stage is given more than it has room for, however long it takes to hear of an end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from asyncspec.core.jobs import Job
from asyncspec.core.kv_slots import BLOCK
from asyncspec.core.machine import Cancelled, Effect, Input, Request
from asyncspec_nodes.roles.draft.admission import slots_used
from asyncspec_protocol.ids import DRAFT, Rank
from asyncspec_protocol.messages import Message
from cluster import Cluster, ask
from effort import examples
from laws import Shaken, check_after, check_empty, clusters, requests, watch_invariants

BOUND = 100_000.0


class Far(Struct, frozen=True):
    """Every pass takes a second, and so do all lines but the draft node's own to some stages."""

    seconds: tuple[float, ...]

    def link(self, source: Rank, target: Rank, message: Message) -> float:
        return self.seconds[max(source, target) - 1] if DRAFT in (source, target) else 1.0

    def device(self, rank: Rank, job: Job) -> float:
        return 1.0


class Shaking(Shaken):
    """Any delays, and beside them a constant one of the draft node's own line to each stage."""

    far: tuple[float, ...] = (0.0,)

    def link(self, source: Rank, target: Rank, message: Message) -> float:
        more = self.far[max(source, target) % len(self.far)] if DRAFT in (source, target) else 0.0
        return more + self.next()


def promised(state: Any) -> int:
    """What a stage's open sessions may come to and what it keeps, in whole blocks."""
    most = [session.max_slots for session in state.sessions.values()]
    return sum(-(-slots // BLOCK) * BLOCK for slots in (*most, *state.cached_prompts.values()))


def watch_room(cluster: Cluster) -> list[int]:
    """Check after each step of a stage that it has room for all that was promised; the sums."""
    watch_invariants(cluster)
    before, sums = cluster.world.watch, [0]
    assert before is not None

    def check(rank: Rank, event: Input, effects: tuple[Effect, ...]) -> None:
        before(rank, event, effects)
        if 0 < rank <= cluster.stages:
            sums.append(promised(cluster.state(rank)))
            assert not cluster.slots or sums[-1] <= cluster.slots, f"stage {rank}"

    cluster.world.watch = check
    return sums


def check_books(cluster: Cluster) -> None:
    """What is over is in no books: there are only the prompts that are kept."""
    state = cluster.state(DRAFT)
    assert not state.pending_releases
    kept = sum(-(-(len(one.prefix) - 1) // BLOCK) * BLOCK for one in state.cached_prompts)
    assert slots_used(state) == kept


@pytest.mark.parametrize("policy", ["chain", "flowspec", "flow"])
def test_a_stage_that_hears_of_prunes_late_waits_for_them_with_what_has_no_room(
    policy: str,
) -> None:
    """Many rounds pass it meanwhile."""
    cluster = Cluster(Far((1.0, 90.0, 1.0)), stages=3)
    watch_room(cluster)
    request = ask(0, prompt=(1, 2, 3), max_new_tokens=40, policy=policy)
    cluster.submit(request)
    cluster.world.run(until=BOUND)
    check_after(cluster, [request])


@settings(max_examples=examples(400, quick=100))
@given(
    clusters(costs=Shaking, slots=128, source_slots=0, stats_seconds=2.0, max_sessions=3),
    requests(5),
    st.lists(st.sampled_from((0.0, 1.0, 5.0, 30.0)), min_size=4, max_size=4),
    st.lists(st.tuples(st.integers(0, 150), st.integers(0, 4)), max_size=3),
    st.lists(
        st.tuples(
            st.integers(0, 150), st.integers(1, 4), st.integers(0, 2), st.sampled_from((0, 1, 7))
        ),
        max_size=4,
    ),
)
def test_a_stage_never_holds_more_than_its_room_and_no_room_is_lost(
    cluster: Cluster,
    asked: list[Request],
    seconds: list[float],
    cancelled: list[tuple[int, int]],
    strikes: list[tuple[int, int, int, int]],
) -> None:
    """Whatever lines take, whoever cancels, and whichever stages and links are lost meanwhile."""
    world, costs = cluster.world, cluster.costs
    assert isinstance(costs, Shaking)
    costs.far = tuple(seconds)
    watch_room(cluster)
    for request in asked:
        cluster.submit(request)
    for when, which in cancelled:
        world.at(when, world.feed, DRAFT, Cancelled(asked[which % len(asked)].request))

    def strike(rank: Rank, what: int) -> None:
        if what == 0:
            world.restart(rank, cluster.node(rank))
        elif what == 1 and rank < cluster.stages:
            world.cut(rank, Rank(rank + 1))
        else:
            world.cut(DRAFT, rank)

    for when, which, what, pause in strikes:
        world.at(when, strike, Rank(1 + which % cluster.stages), what)
        world.at(when + pause, cluster.connect_all)
    world.run(until=BOUND)
    gone = {asked[which % len(asked)].request for _, which in cancelled}
    check_after(cluster, [request for request in asked if request.request not in gone])
    check_empty(cluster)
    check_books(cluster)
