"""A timeline as Chrome trace events: the JSON that Perfetto opens.

One process a node; its threads are its device, its machine, its network, and its waits (which may
overlap, so they are asynchronous events). A segment's flow goes from the step that sent it over
the passes on all stages to the step that received its verdict. Times are whole microseconds.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import msgspec

from asyncspec_nodes.plugins.viewer.analysis.timeline import (
    Instant,
    SegmentLifetime,
    Span,
    Timeline,
    side_by_side,
)
from asyncspec_protocol.ids import SessionId, owner

Event = dict[str, Any]

DEVICE, MACHINE, NETWORK = 1, 2, 3
THREADS = {DEVICE: "device", MACHINE: "machine", NETWORK: "network"}
_THREAD_OF = {
    "compute": DEVICE,
    "draft": DEVICE,
    "cache": DEVICE,
    "step": MACHINE,
    "send": NETWORK,
    "silence": NETWORK,
}
_ARGUMENTS = ("session", "segment", "rows", "useful", "dead", "first", "last", "peer", "nbytes")


def export(timeline: Timeline) -> bytes:
    # Sessions of a draft node that was not recorded have spans on it all the same.
    ranks = {node.rank for node in timeline.nodes}
    spans = side_by_side([span for span in timeline.spans if span.rank in ranks])
    events = [event for i, span in enumerate(spans) for event in _span(i, span)]
    events += [event for i, one in enumerate(timeline.lifetimes) for event in _flow(i, one, ranks)]
    events += map(_instant, timeline.instants)
    # By time; a slice that contains another comes first.
    events.sort(key=lambda event: (event["ts"], -int(event.get("dur", 0))))
    every = [*_names(timeline), *events]
    return msgspec.json.encode({"traceEvents": every, "displayTimeUnit": "ms"})


def micro(seconds: float) -> int:
    return round(seconds * 1e6)


def _names(timeline: Timeline) -> Iterator[Event]:
    for node in timeline.nodes:
        layers = f" layers {node.layers[0]} to {node.layers[1] - 1}" if node.layers[1] else ""
        title = {"name": f"{timeline.name(node.rank)}{layers}"}
        meta: Event = {"ph": "M", "pid": node.rank, "tid": 0, "ts": 0}
        yield {**meta, "name": "process_name", "args": title}
        yield {**meta, "name": "process_sort_index", "args": {"sort_index": node.rank}}
        for number, thread in THREADS.items():
            yield {**meta, "tid": number, "name": "thread_name", "args": {"name": thread}}


def _span(number: int, span: Span) -> Iterator[Event]:
    at, until = micro(span.at), micro(span.until)
    title = span.kind if span.segment < 0 else f"{span.kind} {span.segment}"
    base: Event = {"name": title, "cat": span.kind, "pid": span.rank}
    values = {key: getattr(span, key) for key in _ARGUMENTS}
    args = {key: value for key, value in values.items() if value > 0 or key in ("useful", "dead")}
    if (thread := _THREAD_OF.get(span.kind)) is not None:
        yield {**base, "ph": "X", "tid": thread, "ts": at, "dur": until - at, "args": args}
        return
    # Waits overlap: several segments queue at a time.
    both: Event = {**base, "tid": 0, "id": number}
    yield {**both, "ph": "b", "ts": at, "args": args}
    yield {**both, "ph": "e", "ts": until}


def _flow(number: int, lifetime: SegmentLifetime, ranks: Container[int]) -> Iterator[Event]:
    """Bound to the slices around its moments on the recorded ``ranks``; at least two of them."""
    draft = int(owner(SessionId(lifetime.session)))
    moments = [(draft, MACHINE, lifetime.sent)]
    moments += [(h.rank, DEVICE, h.started) for h in lifetime.hops if h.started is not None]
    if lifetime.verified is not None:
        moments.append((draft, MACHINE, lifetime.verified))
    moments = [moment for moment in moments if moment[0] in ranks]
    if len(moments) < 2:
        return
    phases = ["s", *"t" * (len(moments) - 2), "f"]
    for phase, (rank, thread, at) in zip(phases, moments, strict=True):
        event: Event = {"ph": phase, "id": number, "name": "segment", "cat": "segment"}
        event |= {"pid": rank, "tid": thread, "ts": micro(at)}
        yield {**event, "bp": "e"} if phase == "f" else event


def _instant(instant: Instant) -> Event:
    return {
        "ph": "i",
        "s": "p",
        "name": instant.kind,
        "cat": "mark",
        "pid": instant.rank,
        "tid": MACHINE,
        "ts": micro(instant.at),
        "args": {"session": instant.session, "text": instant.text},
    }
