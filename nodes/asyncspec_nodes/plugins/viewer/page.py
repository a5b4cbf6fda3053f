"""The trace viewer: a timeline as one HTML file that needs no network.

Its data are columns of whole numbers, times in microseconds; -1 stands for none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from importlib import resources
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import Struct

from asyncspec.trace.records import NodeRecord
from asyncspec_nodes.plugins.viewer.analysis.perfetto import micro
from asyncspec_nodes.plugins.viewer.analysis.timeline import Timeline, side_by_side

KINDS = ("compute", "draft", "cache", "queue", "credit", "send", "transfer", "step", "silence")

MOMENTS = ("at", "until", "sent", "verified")
"""Columns that hold times."""

Columns = dict[str, Sequence[object]]

SCRIPTS = [
    f"{name}.js"
    for name in (
        *("rows", "data", "scale", "pixels", "ink", "lanes", "paint", "marks", "rounds", "path"),
        *("map", "tips", "panel", "summary", "tokens", "choose", "input", "main"),
    )
]
"""In the order in which they build on each other."""


def page(timeline: Timeline, summary: object = None) -> str:
    """The viewer for a timeline, as HTML. ``summary`` may be left out."""
    data = model(timeline, summary)
    scripts = "\n".join(map(_asset, SCRIPTS))
    parts = {
        "@title@": escape(f"{data.title} - asyncspec trace", quote=False),
        "@style@": _asset("page.css"),
        "@data@": embed(data),
        "@script@": f'(() => {{\n"use strict";\n{scripts}\n}})();',
    }
    # One after another, each once: inserted content is not searched for markers.
    rest, out = _asset("page.html"), ""
    for marker, content in parts.items():
        head, _, rest = rest.partition(marker)
        out += head + content
    return out + rest


def embed(data: object) -> str:
    """JSON that ends no script element, whatever text is in it."""
    text = msgspec.json.encode(data).decode()
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


class Lane(Struct, frozen=True):
    """One device. ``detail`` is shown below its name."""

    name: str
    detail: str


class PageData(Struct, frozen=True):
    """The page's data. Columns of one table have one length."""

    title: str
    created: str
    program: str
    duration: int
    lanes: Sequence[Lane]
    kinds: Sequence[str]
    spans: Columns
    lifetimes: Columns
    tokens: Columns
    rounds: Columns
    marks: Columns
    # What makes the picture incomplete; what limits its precision.
    warnings: Sequence[str]
    notes: Sequence[str]
    # What ``asyncspec trace --summary --json`` prints, or null.
    summary: object = None


def model(timeline: Timeline, summary: object = None) -> PageData:
    name = timeline.name
    by_rank = {node.rank: node for node in timeline.nodes}
    lanes = {rank: i for i, rank in enumerate(sorted(by_rank))}
    lifetimes = {(item.session, item.segment): i for i, item in enumerate(timeline.lifetimes)}
    return PageData(
        title=timeline.header.title,
        created=timeline.header.created,
        program=timeline.header.program,
        duration=max(1, micro(timeline.duration)),
        lanes=[Lane(name(rank), _detail(by_rank[rank])) for rank in lanes],
        kinds=KINDS,
        spans=_columns(
            side_by_side([span for span in timeline.spans if span.rank in lanes]),
            "lane kind at until lifetime session segment rows useful dead first last peer nbytes",
            lane=lambda span: lanes[span.rank],
            kind=lambda span: KINDS.index(span.kind),
            lifetime=lambda span: lifetimes.get((span.session, span.segment), -1),
            peer=lambda span: "" if span.peer < 0 else name(span.peer),
        ),
        lifetimes=_columns(
            timeline.lifetimes,
            "session segment nodes first last useful emitted sent verified outcome hops",
            nodes=lambda item: len(item.ids),
            first=lambda item: min(item.ids, default=-1),
            last=lambda item: max(item.ids, default=-1),
            # By stage: lane; received, started, ended, sent; rows in, computed, out.
            hops=lambda item: [
                [
                    lanes[hop.rank],
                    *map(_moment, (hop.received, hop.started, hop.ended, hop.sent)),
                    *(len(hop.message.ids), len(hop.ids), hop.rows_out),
                ]
                for hop in item.hops
                if hop.rank in lanes
            ],
        ),
        tokens=_columns(
            timeline.tokens,
            "request index token at lifetime hit depth text",
            hit=lambda token: int(token.hit),
        ),
        rounds=_columns(timeline.rounds, "request number at until tokens end"),
        marks=_columns(
            [item for item in timeline.instants if item.rank in lanes and item.kind != "emit"],
            "lane at kind text",
            lane=lambda item: lanes[item.rank],
        ),
        warnings=[
            f"{name(rank)}: {count} lines of its recording were lost, so what they describe is "
            "missing here"
            for rank, count in timeline.dropped
        ],
        notes=[
            f"{name(clock.rank)}: clock within {clock.uncertainty * 1e3:.2f} ms, "
            f"drift {clock.drift * 1e6:+.0f} ppm ({clock.probes} probes)"
            for clock in timeline.clocks
            if clock.probes
        ],
        summary=summary,
    )


def _columns(rows: Sequence[Any], names: str, **made: Callable[[Any], object]) -> Columns:
    """A table: each column is ``made`` from its rows, or is their field of that name."""
    columns: Columns = {}
    for name in names.split():
        values = list(map(made.get(name, attrgetter(name)), rows))
        columns[name] = list(map(_moment, values)) if name in MOMENTS else values
    return columns


def _moment(seconds: float | None) -> int:
    return -1 if seconds is None else micro(seconds)


def _detail(node: NodeRecord) -> str:
    if node.role != "verify":
        return "draft node" if node.role == "draft" else "token source"
    first, end = node.layers
    if end <= first:
        return "verify stage"
    return f"layers {first}-{end - 1}" if end - first > 1 else f"layer {first}"
