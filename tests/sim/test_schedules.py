"""Solo equals batched: whoever comes when, and whoever leaves when, each gets what is theirs.

A request's text is the sequential decoder's, and so is that of the same request alone; here are up
to sixteen at a time, a thousand times in ``make nightly`` (SpecPipe-DB; D1 and D5 of what batching
owes its users).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncspec.core.jobs import Batch, Forward
from asyncspec.core.machine import Cancelled, Request, Submitted
from asyncspec_protocol.ids import DRAFT, Rank
from cluster import Cluster, ask
from costs import UnitCosts
from effort import examples
from laws import check_empty, clusters, requests, watch_invariants

BOUND = 100_000.0
MOST = 16
SCHEDULES = examples(1000, quick=250)

moments = st.lists(st.integers(0, 60), min_size=MOST, max_size=MOST)
cancellations = st.dictionaries(st.integers(0, MOST - 1), st.integers(1, 90), max_size=4)


@settings(max_examples=SCHEDULES, suppress_health_check=[HealthCheck.too_slow])
@given(clusters(max_sessions=MOST), requests(MOST), moments, cancellations)
def test_solo_equals_batched(
    cluster: Cluster, asked: list[Request], arrivals: list[int], left: dict[int, int]
) -> None:
    watch_invariants(cluster)
    world = cluster.world
    for request, when in zip(asked, arrivals, strict=False):
        world.at(when, world.feed, DRAFT, Submitted(request))
        if request.request in left:
            world.at(when + left[request.request], world.feed, DRAFT, Cancelled(request.request))
    world.run(until=BOUND)
    for request in asked:
        given_out, finish = tuple(world.tokens.get(request.request, ())), world.finished
        expected = cluster.expected(request)
        if finish[request.request].reason == "cancelled":
            assert request.request in left
            expected = expected[: len(given_out)]
        assert given_out == expected
    check_empty(cluster)


@pytest.mark.parametrize("policy", ["autoregressive", "chain", "flowspec", "specpipe"])
def test_sessions_share_passes(policy: str) -> None:
    """Else the law above would say nothing."""
    cluster = Cluster(UnitCosts(), stages=2, max_sessions=MOST)
    sizes: list[int] = []
    for rank in (1, 2):
        actor = cluster.world.actors[Rank(rank)]
        run = actor.device

        def counted(job: object, run: Callable[[object], object | None] = run) -> object:
            if isinstance(job, Forward | Batch):
                sizes.append(len(job.passes) if isinstance(job, Batch) else 1)
            return run(job)

        actor.device = counted
    for number in range(6):
        cluster.submit(ask(number, prompt=(number,), policy=policy))
    cluster.world.run(until=BOUND)
    assert sum(size > 1 for size in sizes) > len(sizes) / 2
