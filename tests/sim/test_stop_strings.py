"""An answer that a stop string ends: its work is called off everywhere, whenever that is known."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.core.machine import Request
from asyncspec_protocol.ids import DRAFT, Rank
from cluster import Cluster, ask
from costs import UnitCosts
from effort import examples
from laws import check_after, check_empty, clusters, requests
from reader import Reader

BOUND = 100_000.0


@settings(max_examples=examples(250, quick=100))
@given(
    clusters(),
    requests(3),
    st.integers(1, 14),
    st.sampled_from([0, 0, 1, 5, 30]),
    st.lists(st.integers(0, 60), max_size=2),
)
def test_an_answer_ends_where_its_text_does(
    cluster: Cluster, asked: list[Request], kept: int, delay: int, losses: list[int]
) -> None:
    world, reader = cluster.world, Reader(cluster, asked[0], kept, delay)
    for request in asked:
        cluster.submit(request)
    for when in losses:
        world.at(when, lambda: world.cut(DRAFT, Rank(cluster.stages)))
        world.at(when + 7, cluster.connect_all)
    world.run(until=BOUND)
    if reader.reported is None:
        check_after(cluster, asked)
        return
    assert tuple(world.tokens[0]) == cluster.expected(asked[0])[: reader.reported]
    assert world.finished[0].reason == "stop"
    assert world.finished[0].stats["new_tokens"] == kept
    assert world.finished[0].stats["wasted_rows"] >= 0
    hits = [hit for hit in reader.hits[:kept] if hit is not None]
    assert world.finished[0].stats["hit_rate"] == (sum(hits) / len(hits) if hits else 0.0)
    check_empty(cluster)
    check_after(cluster, asked[1:])


def test_after_an_immediate_stop_nothing_is_sent_or_drafted() -> None:
    whole, cut = Cluster(UnitCosts()), Cluster(UnitCosts())
    request = ask(max_new_tokens=60)
    reader = Reader(cut, request, kept=9)
    for cluster in (whole, cut):
        cluster.submit(request)
        cluster.world.run()
    assert reader.reported in (9, 10, 11, 12)
    assert cut.world.finished[0].stats["new_tokens"] == 9
    for name in ("rows", "drafted_nodes", "turns"):
        assert cut.world.finished[0].stats[name] < whole.world.finished[0].stats[name] / 3
