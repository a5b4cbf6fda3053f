"""A request that breaks the pipeline whenever it is read ends with an error; nobody else does."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.core.jobs import Batch, Forward
from asyncspec.core.machine import Compute, Effect, Input, Request, Submitted
from asyncspec_protocol.ids import DRAFT, Rank
from cluster import Cluster, ask
from costs import UnitCosts
from effort import examples
from laws import check_answer, check_empty, clusters, requests, watch_invariants

BOUND = 100_000.0
MOST = 2
"""Breaks of the pipeline that a request may see in a row."""


class Breaker:
    """A request that kills a stage whenever that is to compute a row of it at some position or
    behind; the stage comes back."""

    def __init__(self, cluster: Cluster, request: int, position: int, stage: Rank) -> None:
        self.kills = 0
        self._cluster = cluster
        self._request = request
        self._position = position
        self._stage = stage
        self._struck = False
        watch_invariants(cluster)
        self._invariants = cluster.world.watch
        cluster.world.watch = self._watch

    def _watch(self, rank: Rank, event: Input, effects: tuple[Effect, ...]) -> None:
        assert self._invariants is not None
        self._invariants(rank, event, effects)
        if rank == self._stage and not self._struck and any(map(self._deadly, effects)):
            self._struck = True
            self._cluster.world.at(self._cluster.world.now, self._strike)

    def _deadly(self, effect: Effect) -> bool:
        job = effect.job if isinstance(effect, Compute) else None
        passes = job.passes if isinstance(job, Batch) else (job,)
        return any(isinstance(one, Forward) and self._kills(one) for one in passes)

    def _kills(self, one: Forward) -> bool:
        session = self._cluster.state(DRAFT).sessions.get(one.session)
        mine = session is not None and session.request.request == self._request
        return mine and max(row.position for row in one.rows) >= self._position

    def _strike(self) -> None:
        self._struck = False
        self.kills += 1
        world = self._cluster.world
        world.restart(self._stage, self._cluster.stage(self._stage))
        world.at(world.now + 3, self._cluster.connect_all)


@settings(max_examples=examples(150, quick=60))
@given(
    clusters(max_breaks=MOST),
    requests(5),
    st.integers(0, 12),
    st.integers(0, 3),
    st.lists(st.integers(0, 60), min_size=5, max_size=5),
)
def test_a_poison_request_is_found_among_others(
    cluster: Cluster, asked: list[Request], position: int, stage: int, moments: list[int]
) -> None:
    """Soon, and whoever shares passes with it gets the whole text."""
    world, bad = cluster.world, asked[0]
    breaker = Breaker(cluster, bad.request, position, Rank(1 + stage % cluster.stages))
    for request, when in zip(asked, moments, strict=False):
        world.at(when, world.feed, DRAFT, Submitted(request))
    world.run(until=BOUND)
    finish = world.finished[bad.request]
    if finish.reason == "error":
        assert breaker.kills >= MOST
        assert f"broke {MOST} times in a row" in finish.detail
    given_out = tuple(world.tokens.get(bad.request, ()))
    assert given_out == cluster.expected(bad)[: len(given_out)]
    # A draft may reach so far ahead that tokens come before the first kills.
    assert breaker.kills <= len(given_out) + MOST + 1
    if not given_out:
        assert breaker.kills <= MOST
    for request in asked[1:]:
        check_answer(cluster, request)
    check_empty(cluster)


def test_a_poison_request_alone_is_ended() -> None:
    cluster = Cluster(UnitCosts(), stages=2, max_breaks=MOST)
    breaker = Breaker(cluster, 0, 2, Rank(2))
    cluster.submit(ask())
    cluster.world.run(until=BOUND)
    finish = cluster.world.finished[0]
    assert (finish.reason, finish.code, breaker.kills) == ("error", "breaks", MOST)
    assert finish.stats["sessions"] == MOST
    check_empty(cluster)


def test_a_poison_request_may_have_emitted_tokens() -> None:
    """The user has what came before it, and as many breaks are enough."""
    cluster = Cluster(UnitCosts(), stages=2, max_breaks=MOST)
    breaker = Breaker(cluster, 0, 20, Rank(1))
    request = ask(policy="autoregressive")  # nothing is computed before it is certain
    cluster.submit(request)
    cluster.world.run(until=BOUND)
    assert (cluster.world.finished[0].reason, breaker.kills) == ("error", MOST)
    given_out = tuple(cluster.world.tokens[0])
    assert len(given_out) >= 20 - len(request.prompt)
    assert given_out == cluster.expected(request)[: len(given_out)]
    stats = cluster.world.finished[0].stats
    useful = 2 * (len(request.prompt) + len(given_out) - 1)
    assert max(0, stats["rows"] - useful) == stats["wasted_rows"] < stats["rows"]


def test_machines_that_come_and_go_cost_no_request_that_goes_on() -> None:
    """Far more breaks than a request may see in a row: a token between them makes them others."""
    cluster = Cluster(UnitCosts(), stages=2, max_breaks=MOST, prefill_rows=64)
    world, request = cluster.world, ask(max_new_tokens=200)
    cluster.submit(request)
    for moment in range(20, 400, 20):
        world.at(moment, world.cut, Rank(1), Rank(2))
        world.at(moment + 1, cluster.connect_all)
    world.run(until=BOUND)
    assert world.finished[0].stats["sessions"] > 2 * MOST
    check_answer(cluster, request)
