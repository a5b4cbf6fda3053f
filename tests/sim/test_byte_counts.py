"""Every byte that nodes write for a session is counted for its request, and for no other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from asyncspec.core.machine import Request, TraceHook
from asyncspec.sim.costs import Costs
from asyncspec.sim.world import Actor, World
from asyncspec_protocol.framing import frame_bytes
from asyncspec_protocol.ids import DRAFT, Rank
from asyncspec_protocol.messages import Closed, Message
from cluster import Cluster
from effort import examples
from laws import check_after, clusters, requests

BOUND = 100_000.0


class Scales(Struct):
    """Bytes take no time; sums those of sessions' messages but for ``Closed``."""

    total: int = 0

    def nbytes(self, message: Message) -> int:
        return frame_bytes(message)

    def transfer_seconds(self, message: Message) -> float:
        return 0.0

    def occupied_seconds(self, message: Message) -> float:
        if hasattr(message, "session") and not isinstance(message, Closed):
            self.total += frame_bytes(message)
        return 0.0


class Weighed(World):
    """A world with scales."""

    def __init__(
        self,
        actors: Mapping[Rank, Actor],
        costs: Costs,
        trace_hooks: Mapping[Rank, TraceHook],
        **options: Any,
    ) -> None:
        self.scales = Scales()
        super().__init__(actors, costs, trace_hooks, self.scales, **options)


@settings(max_examples=examples(150, quick=60))
@given(
    clusters(world=Weighed, stats_seconds=50.0, min_common_prefix=1000),
    requests(3),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 4)), max_size=3),
    st.booleans(),
)
def test_each_byte_is_counted_once(
    cluster: Cluster, asked: list[Request], losses: list[tuple[int, int]], between: bool
) -> None:
    """Also those of sessions that a break has ended; but for accounts that are lost with a link."""
    world = cluster.world
    assert isinstance(world, Weighed)
    for request in asked:
        cluster.submit(request)
    for when, which in losses:
        stage = Rank(1 + which % cluster.stages)
        if not between:
            world.at(when, world.cut, DRAFT, stage)
        elif stage < cluster.stages:
            world.at(when, world.cut, stage, Rank(stage + 1))
        world.at(when + 7, cluster.connect_all)
    world.run(until=BOUND)
    check_after(cluster, asked)
    booked = sum(world.finished[request.request].stats["bytes_sent"] for request in asked)
    written = world.scales.total
    assert booked <= written
    # A source's accounts are not waited for, and what is on its way on a link that is cut is lost.
    if between and cluster.config.source is None:
        assert booked == written
    assert not world.network.session_bytes
