"""The rules of trace events, checked on an exported timeline."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from asyncspec_nodes.plugins.viewer.analysis.perfetto import export
from asyncspec_nodes.plugins.viewer.analysis.timeline import Timeline

Event = dict[str, Any]


def exported(found: Timeline) -> list[Event]:
    """The events of a timeline, as a viewer reads them."""
    events: list[Event] = json.loads(export(found))["traceEvents"]
    return events


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


def check_rules(events: list[Event]) -> None:
    for rule in RULES:
        rule(events)
