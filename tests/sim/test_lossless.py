"""The law of laws: under any delays the output is the sequential reference decoder's."""

from __future__ import annotations

from hypothesis import given, settings

from asyncspec.core.machine import Effect, Finish, Input, Request
from asyncspec_protocol.ids import DRAFT, Rank
from cluster import Cluster, ask
from costs import UnitCosts
from effort import examples
from laws import check_after, clusters, requests, watch_invariants

# More virtual time than any of these small requests can need: a bound on liveness.
BOUND = 100_000.0


@settings(max_examples=examples(700, quick=250))
@given(clusters(), requests(3))
def test_output_is_the_reference_decoders(cluster: Cluster, asked: list[Request]) -> None:
    watch_invariants(cluster)
    for request in asked:
        cluster.submit(request)
    cluster.world.run(until=BOUND)
    check_after(cluster, asked)


def test_a_pipeline_that_never_comes_back_fails_the_request_in_bounded_time() -> None:
    cluster = Cluster(UnitCosts(), stages=2, rejoin_seconds=30.0)
    cluster.submit(ask(max_new_tokens=50))
    cluster.world.at(9.0, lambda: cluster.world.cut(Rank(1), Rank(2)))
    cluster.world.run(until=60.0)
    finish = cluster.world.finished[0]
    assert finish.reason == "error"
    assert "stage 1 has no link to stage 2" in finish.detail
    assert cluster.world.now <= 40.0


def test_a_node_that_comes_and_goes_does_not_prolong_the_wait_for_one_that_is_gone() -> None:
    cluster = Cluster(UnitCosts(), stages=2, rejoin_seconds=30.0)
    world = cluster.world
    cluster.submit(ask(max_new_tokens=50))
    world.at(9.0, lambda: world.cut(DRAFT, Rank(1)))
    for moment in range(20, 200, 20):
        world.at(moment, lambda: world.cut(DRAFT, Rank(2)))
        world.at(moment + 5, lambda: world.connect(DRAFT, Rank(2)))
    ends: list[float] = []

    def watch(rank: Rank, event: Input, effects: tuple[Effect, ...]) -> None:
        ends.extend(world.now for effect in effects if isinstance(effect, Finish))

    world.watch = watch
    world.run(until=BOUND)
    assert ends == [39.0]
    assert "stage 1 is not connected" in world.finished[0].detail
