"""A recording replayed through the pure machines gives the same effects."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncspec_nodes.replay import replay
from cluster import Cluster, ask
from laws import SMALL, Shaken


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=20),
    st.sampled_from(sorted(SMALL)),
    st.integers(1, 4),
)
def test_same_inputs_same_effects(delays: list[int], policy: str, stages: int) -> None:
    cluster = Cluster(Shaken(delays), stages=stages, policies=SMALL, record=True)
    for number in range(2):
        cluster.submit(ask(number, policy=policy))
    cluster.world.run()
    found = replay(cluster.trace().lines, SMALL)
    assert [node.rank for node in found] == list(range(stages + 1))
    assert sum(node.steps for node in found) == cluster.world.steps
    assert not any(node.differences for node in found)
