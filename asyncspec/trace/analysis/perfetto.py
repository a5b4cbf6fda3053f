"""A timeline as Chrome trace events: the JSON that Perfetto opens. Pure.

One process a node; its threads are its device, its machine, its network, and its waits (which may
overlap, so they are asynchronous events). A segment's flow goes from the step that sent it over
the passes on all stages to the step that took its verdict. Times are whole microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from asyncspec.trace.analysis.critical_path import name
from asyncspec.trace.analysis.timeline import Instant, SegmentLifetime, Span, Timeline, side_by_side

Event = dict[str, object]

_THREADS = {"device": 1, "machine": 2, "network": 3}
_OF_KIND = {
    "compute": "device",
    "draft": "device",
    "cache": "device",
    "step": "machine",
    "send": "network",
    "silence": "network",
}


def export(timeline: Timeline) -> bytes:
    """The whole file."""
    events = [*_names(timeline), *_sorted(_events(timeline))]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _names(timeline: Timeline) -> Iterator[Event]:
    for node in timeline.nodes:
        layers = f" layers {node.layers[0]} to {node.layers[1] - 1}" if node.layers[1] else ""
        title = {"name": f"{name(node.rank, timeline.stages)}{layers}"}
        meta: Event = {"ph": "M", "pid": node.rank, "tid": 0, "ts": 0}
        yield {**meta, "name": "process_name", "args": title}
        yield {**meta, "name": "process_sort_index", "args": {"sort_index": node.rank}}
        for thread, number in _THREADS.items():
            yield {**meta, "tid": number, "name": "thread_name", "args": {"name": thread}}


def _events(timeline: Timeline) -> Iterator[Event]:
    for i, span in enumerate(side_by_side(timeline.spans)):
        yield from _span(i, span)
    for i, lifetime in enumerate(timeline.lifetimes):
        yield from _flow(i, lifetime)
    for instant in timeline.instants:
        yield _instant(instant)


def _sorted(events: Iterator[Event]) -> list[Event]:
    """By time; a slice that contains another comes first."""
    return sorted(events, key=lambda e: (e["ts"], -int(e.get("dur", 0))))  # type: ignore[call-overload]


def _micro(seconds: float) -> int:
    return round(seconds * 1e6)


def _span(number: int, span: Span) -> Iterator[Event]:
    at, until = _micro(span.at), _micro(span.until)
    title = span.kind if span.segment < 0 else f"{span.kind} {span.segment}"
    thread = _OF_KIND.get(span.kind)
    base: Event = {"name": title, "cat": span.kind, "pid": span.rank}
    if thread is not None:
        yield {
            **base,
            "ph": "X",
            "tid": _THREADS[thread],
            "ts": at,
            "dur": until - at,
            "args": _arguments(span),
        }
        return
    # Waits overlap: several segments queue at a time.
    both: Event = {**base, "tid": 0, "id": number}
    yield {**both, "ph": "b", "ts": at, "args": _arguments(span)}
    yield {**both, "ph": "e", "ts": until}


def _arguments(span: Span) -> Event:
    wanted = ("session", "segment", "rows", "useful", "dead", "first", "last", "peer", "nbytes")
    values = {key: getattr(span, key) for key in wanted}
    return {key: value for key, value in values.items() if value > 0 or key in ("useful", "dead")}


def _flow(number: int, lifetime: SegmentLifetime) -> Iterator[Event]:
    """Bound to the slices around its moments: a flow with one end is none."""
    passes = [hop for hop in lifetime.hops if hop.started is not None]
    moments = [(0, "machine", lifetime.sent)]
    moments += [(hop.rank, "device", hop.started or 0.0) for hop in passes]
    if lifetime.verified is not None:
        moments.append((0, "machine", lifetime.verified))
    if len(moments) < 2:
        return
    for i, (rank, thread, at) in enumerate(moments):
        phase = "s" if i == 0 else "f" if i == len(moments) - 1 else "t"
        event: Event = {
            "ph": phase,
            "id": number,
            "name": "segment",
            "cat": "segment",
            "pid": rank,
            "tid": _THREADS[thread],
            "ts": _micro(at),
        }
        yield {**event, "bp": "e"} if phase == "f" else event


def _instant(instant: Instant) -> Event:
    return {
        "ph": "i",
        "s": "p",
        "name": instant.kind,
        "cat": "mark",
        "pid": instant.rank,
        "tid": _THREADS["machine"],
        "ts": _micro(instant.at),
        "args": {"session": instant.session, "text": instant.text},
    }
