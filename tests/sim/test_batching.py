"""Many sessions and one token source: the text is the reference decoder's, the source is asked for
one batch at a time, and a batch costs what its longest tree costs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.core.costs import DraftCost, pass_rows
from asyncspec.core.jobs import DraftBatch, Job, draft_jobs
from asyncspec.core.machine import Abandon, Cancelled, Compute, Effect, Input, Request
from asyncspec.sim.costs import ClusterCost, CostModel
from asyncspec.sim.world import Actor, World
from asyncspec_protocol.ids import DRAFT, Rank
from asyncspec_protocol.messages import Expand, Expanded
from cluster import Cluster, ask
from costs import UnitCosts
from effort import examples
from laws import check_after, check_empty, check_node, clusters, requests

BOUND = 100_000.0


class DraftRequests:
    """Every machine's own rules, and what the source is asked: one batch at a time, no session
    twice in it."""

    def __init__(self, cluster: Cluster) -> None:
        self.jobs: list[Job] = []
        self._cluster = cluster
        self._rank = cluster.config.source or DRAFT
        cluster.world.watch = self._watch

    def _watch(self, rank: Rank, event: Input, effects: tuple[Effect, ...]) -> None:
        check_node(self._cluster, rank)
        asked = [e.job for e in effects if isinstance(e, Compute) and draft_jobs(e.job)]
        assert rank == self._rank or not asked
        self.jobs += asked
        underway = self._cluster.world.actors[self._rank].queue
        assert sum(bool(draft_jobs(entry.job)) for entry in underway) + len(asked) <= 1
        for job in asked:
            sessions = [tree.session for tree in draft_jobs(job)]
            assert len(sessions) == len(set(sessions))
            assert (len(sessions) > 1) == isinstance(job, DraftBatch)


@settings(max_examples=examples(150, quick=40), deadline=None)
@given(
    clusters(max_sessions=16),
    requests(16),
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 15)), max_size=5),
)
def test_output_is_the_reference_decoders_in_any_mix_of_sessions(
    cluster: Cluster, asked: list[Request], cancels: list[tuple[int, int]]
) -> None:
    DraftRequests(cluster)
    world = cluster.world
    for request in asked:
        cluster.submit(request)
    doomed = {asked[which % len(asked)].request for _, which in cancels}
    for when, which in cancels:
        number = asked[which % len(asked)].request
        world.at(when, lambda number=number: world.feed(DRAFT, Cancelled(number)))
    world.run(until=BOUND)
    for request in asked:
        given_up = tuple(world.tokens.get(request.request, ()))
        assert given_up == cluster.expected(request)[: len(given_up)]
    check_empty(cluster)
    check_after(cluster, [r for r in asked if r.request not in doomed])


@settings(max_examples=examples(100, quick=40))
@given(clusters(max_sessions=1), requests(3))
def test_a_session_alone_is_never_in_a_batch(cluster: Cluster, asked: list[Request]) -> None:
    watched = DraftRequests(cluster)
    for request in asked:
        cluster.submit(request)
    cluster.world.run(until=BOUND)
    check_after(cluster, asked)
    assert all(isinstance(job, Expand) for job in watched.jobs)


@pytest.mark.parametrize("apart", [False, True])
def test_the_source_of_many_sessions_works_much_less_than_for_each_by_itself(apart: bool) -> None:
    pricing = CostModel(ClusterCost(draft=DraftCost(level_seconds=0.5)))

    class Costs(UnitCosts, frozen=True):
        def device(self, rank: Rank, job: Job) -> float:
            return pricing.device(DRAFT, job) if draft_jobs(job) else super().device(rank, job)

    cluster = Cluster(Costs(), stages=2, max_sessions=8, apart=apart)
    watched = DraftRequests(cluster)
    asked = [ask(number, prompt=(1, 2, number % 8)) for number in range(8)]
    for request in asked:
        cluster.submit(request)
    cluster.world.run(until=BOUND)
    check_after(cluster, asked)
    trees = [tree for job in watched.jobs for tree in draft_jobs(job)]
    alone = sum(pricing.device(DRAFT, tree) for tree in trees)
    assert cluster.world.actors[cluster.config.source or DRAFT].busy_seconds < alone / 2


trees = st.builds(
    lambda news, depth, width, beam, frontier: Expand(
        0, 0, 0, (1,) * news, depth, width, 9, beam=beam, frontier=(-1,) * frontier
    ),
    st.integers(0, 300),
    st.integers(0, 9),
    st.integers(1, 20),
    st.sampled_from([0, 0, 7]),
    st.sampled_from([0, 0, 3, 30]),
)
costs = st.builds(
    DraftCost, st.just(0.25), st.sampled_from([0.0, 0.5]), st.integers(0, 100), st.just(0.0)
)
costs_of_rows = st.builds(DraftCost, st.just(0.25), st.just(0.5), st.integers(0, 100), st.just(0.5))


@given(costs, st.lists(trees, min_size=1, max_size=6))
def test_a_batch_takes_as_long_as_its_longest_tree(cost: DraftCost, batch: list[Expand]) -> None:
    assert cost.seconds(*batch) == max(map(cost.seconds, batch))


@given(costs_of_rows, st.lists(trees, min_size=1, max_size=6))
def test_rows_past_the_plateau_cost_more_and_never_more_than_one_after_another(
    cost: DraftCost, batch: list[Expand]
) -> None:
    together, free = cost.seconds(*batch), DraftCost(0.25, 0.5).seconds(*batch)
    most = sum(0.5 * rows for tree in batch for rows in pass_rows(tree))
    assert free <= together <= free + most
    more = DraftCost(0.25, 0.5, cost.plateau + 1, 0.5)
    assert more.seconds(*batch) <= together


@given(trees)
def test_a_tree_takes_a_pass_for_each_level_and_the_tokens_before_it(tree: Expand) -> None:
    rows = pass_rows(tree)
    reading = max(0, len(tree.committed) - 1) // 64
    assert len(rows) == max(1, tree.depth) + reading
    if not tree.frontier:
        assert sum(rows[: reading + 1]) == max(1, len(tree.committed))


class Told:
    """A machine that does what it is told, and remembers what came of it."""

    def __init__(self) -> None:
        self.received: list[tuple[float, Any]] = []

    def step(self, state: Any, event: Any, now: float) -> tuple[Any, tuple[Effect, ...]]:
        if isinstance(event, Cancelled):
            return state, (self.todo.pop(0),)
        self.received.append((now, event))
        return state, ()

    todo: list[Effect]


@pytest.mark.parametrize(("given_up", "end"), [(1, 4.0), (2, 2.0)])
def test_a_batch_ends_early_when_all_its_jobs_are_abandoned(given_up: int, end: float) -> None:
    batch = DraftBatch(tuple(Expand(i, 0, 0, (1,), 4, 2, 9) for i in range(2)))
    machine, ran = Told(), []

    def device(job: Any) -> Any:
        ran.append([tree.count for tree in job.jobs])
        return tuple(Expanded(tree.session, 0, 1, (), (), ()) for tree in job.jobs)

    pricing = CostModel(ClusterCost(draft=DraftCost(level_seconds=1.0)))
    world = World({DRAFT: Actor(machine, None, device)}, pricing)  # type: ignore[arg-type]
    machine.todo = [Compute(batch), *(Abandon(tree) for tree in batch.jobs[:given_up])]
    for when in (0.0, 1.0, 2.0)[: given_up + 1]:
        world.at(when, world.feed, DRAFT, Cancelled(0))
    world.run()
    ((when, event),) = machine.received
    assert (when, event.job) == (end, batch)
    assert ran == [[0, 9] if given_up == 1 else [0, 0]]
