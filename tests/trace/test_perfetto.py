"""The trace-event rules, checked on exported runs."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from asyncspec.trace.analysis.build import build
from asyncspec.trace.analysis.perfetto import export
from cluster import Cluster, ask
from laws import SMALL, Shaken

Event = dict[str, Any]


def exported(delays: list[int], policy: str, stages: int) -> list[Event]:
    cluster = Cluster(Shaken(delays), stages=stages, policies=SMALL, record=True)
    cluster.submit(ask(policy=policy))
    cluster.world.run()
    found = json.loads(export(build(cluster.trace())))
    events: list[Event] = found["traceEvents"]
    return events


runs = st.builds(
    exported,
    st.lists(st.integers(0, 9), min_size=1, max_size=20),
    st.sampled_from(sorted(SMALL)),
    st.integers(1, 4),
)


def times_never_go_back_on_a_track(events: list[Event]) -> None:
    last: dict[tuple[int, int], int] = defaultdict(int)
    for event in events:
        if event["ph"] == "M":
            continue
        track = (event["pid"], event["tid"])
        assert isinstance(event["ts"], int)
        assert event["ts"] >= last[track] >= 0
        last[track] = event["ts"]
        assert event.get("dur", 0) >= 0


def every_begin_has_its_end(events: list[Event]) -> None:
    begun: dict[tuple[int, int], Event] = {}
    for event in events:
        if event["ph"] == "b":
            assert (event["pid"], event["id"]) not in begun
            begun[event["pid"], event["id"]] = event
        elif event["ph"] == "e":
            other = begun.pop((event["pid"], event["id"]))
            assert other["name"] == event["name"]
            assert other["cat"] == event["cat"]
    assert not begun


def slices_of_a_track_nest(events: list[Event]) -> None:
    open_until: dict[tuple[int, int], list[int]] = defaultdict(list)
    for event in (e for e in events if e["ph"] == "X"):
        stack = open_until[event["pid"], event["tid"]]
        while stack and stack[-1] <= event["ts"]:
            stack.pop()
        end = event["ts"] + event["dur"]
        assert not stack or end <= stack[-1]
        stack.append(end)


def a_flow_has_a_start_and_an_end_inside_slices(events: list[Event]) -> None:
    flows: dict[int, list[Event]] = defaultdict(list)
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] in ("s", "t", "f"):
            flows[event["id"]].append(event)
        elif event["ph"] == "X":
            end = event["ts"] + event["dur"]
            slices[event["pid"], event["tid"]].append((event["ts"], end))
    for steps in flows.values():
        steps.sort(key=lambda event: "stf".index(event["ph"]))
        phases = "".join(event["ph"] for event in steps)
        assert phases[0] == "s"
        assert phases[-1] == "f"
        assert phases.count("s") == phases.count("f") == 1
        times = [event["ts"] for event in steps]
        assert times[0] == min(times)
        assert times[-1] == max(times)
        for event in steps:
            around = slices[event["pid"], event["tid"]]
            assert any(at <= event["ts"] <= until for at, until in around)


RULES = (
    times_never_go_back_on_a_track,
    every_begin_has_its_end,
    slices_of_a_track_nest,
    a_flow_has_a_start_and_an_end_inside_slices,
)


@given(runs)
def test_the_rules_hold(events: list[Event]) -> None:
    """All of them on each run: making one costs far more than reading it."""
    for rule in RULES:
        rule(events)


def test_tracks_have_names() -> None:
    events = exported([1, 2], "flowspec", 2)
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["D0", "V1", "V2"]
