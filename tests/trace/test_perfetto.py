"""An exported timeline in a viewer; the rules of its events are checked by ``test_reading``."""

from __future__ import annotations

from asyncspec.trace.analysis.build import build
from cluster import Cluster, ask
from laws import SMALL, Shaken
from trace_events import exported


def test_tracks_have_names() -> None:
    cluster = Cluster(Shaken([1, 2]), stages=2, policies=SMALL, record=True)
    cluster.submit(ask(policy="flowspec"))
    cluster.world.run()
    events = exported(build(cluster.trace()))
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["D0", "V1", "V2"]
