"""An exported timeline in a viewer; the rules of its events are checked by ``test_reading``."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from asyncspec_nodes.plugins.viewer.analysis.build import build
from asyncspec_protocol.ids import SessionId, draft_rank, owner
from cluster import Cluster, ask
from laws import SMALL, Shaken
from trace_events import exported


@pytest.mark.parametrize("asked", [0, 1])
def test_arrows_of_one_of_several_draft_nodes(asked: int) -> None:
    """They begin and end at it. Of the other one, which was not recorded, there is no track."""
    cluster = Cluster(Shaken([1, 2]), stages=2, drafts=2, policies=SMALL, record=True)
    for number in range(2):
        cluster.submit(ask(number, policy="flowspec"), draft_rank(number))
    cluster.world.run()
    trace, rank = cluster.trace(), draft_rank(asked)
    mine = tuple(line for line in trace.lines if line.rank in (rank, 1, 2))
    found = build(replace(trace, lines=mine))
    events = exported(found)
    assert {event["pid"] for event in events} == {rank, 1, 2}
    for phase in "sf":
        arrows = {event["id"] for event in events if event["ph"] == phase and event["pid"] == rank}
        own = [
            number
            for number, one in enumerate(found.lifetimes)
            if owner(SessionId(one.session)) == rank
            and (one.verified is not None if phase == "f" else one.hops and one.hops[0].started)
        ]
        assert arrows == set(own)


def test_tracks_have_names() -> None:
    cluster = Cluster(Shaken([1, 2]), stages=2, policies=SMALL, record=True)
    cluster.submit(ask(policy="flowspec"))
    cluster.world.run()
    events = exported(build(cluster.trace()))
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["D0", "V1", "V2"]
