"""What the page is told of a timeline: columns of whole numbers, times in microseconds. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from asyncspec.trace.analysis.critical_path import name
from asyncspec.trace.analysis.timeline import (
    Instant,
    Round,
    SegmentLifetime,
    Span,
    Timeline,
    Token,
    side_by_side,
)
from asyncspec.trace.records import Node

KINDS = (
    "compute",
    "draft",
    "cache",
    "queue",
    "credit",
    "send",
    "transfer",
    "step",
    "silence",
)

Columns = dict[str, Sequence[object]]


class Lane(Struct, frozen=True):
    """One device. ``detail`` stands under its name."""

    name: str
    detail: str


class Model(Struct, frozen=True):
    """The page's data. Columns of one table have one length; -1 stands for none."""

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


def model(timeline: Timeline, summary: object = None) -> Model:
    """The page's data for a timeline."""
    lanes = {rank: i for i, rank in enumerate(sorted({node.rank for node in timeline.nodes}))}
    by_rank = {node.rank: node for node in timeline.nodes}
    lifetimes = {(j.session, j.segment): i for i, j in enumerate(timeline.lifetimes)}
    return Model(
        title=timeline.header.title,
        created=timeline.header.created,
        program=timeline.header.program,
        duration=max(1, micro(timeline.duration)),
        lanes=[Lane(name(rank, timeline.stages), _detail(by_rank[rank])) for rank in lanes],
        kinds=KINDS,
        spans=_spans(
            side_by_side([s for s in timeline.spans if s.rank in lanes]),
            lanes,
            lifetimes,
            timeline.stages,
        ),
        lifetimes=_lifetimes(timeline.lifetimes, lanes),
        tokens=_tokens(timeline.tokens),
        rounds=_rounds(timeline.rounds),
        marks=_instants([m for m in timeline.instants if m.rank in lanes], lanes),
        warnings=_warnings(timeline),
        notes=_notes(timeline),
        summary=summary,
    )


def micro(seconds: float) -> int:
    """Whole microseconds."""
    return round(seconds * 1e6)


def _detail(node: Node) -> str:
    if node.role != "verify":
        return "draft node" if node.role == "draft" else "token source"
    first, end = node.layers
    if end <= first:
        return "verify stage"
    return f"layers {first}-{end - 1}" if end - first > 1 else f"layer {first}"


def _spans(
    spans: Sequence[Span],
    lanes: dict[int, int],
    lifetimes: dict[tuple[int, int], int],
    stages: int,
) -> Columns:
    return {
        "lane": [lanes[s.rank] for s in spans],
        "kind": [KINDS.index(s.kind) for s in spans],
        "at": [micro(s.at) for s in spans],
        "until": [micro(s.until) for s in spans],
        "lifetime": [lifetimes.get((s.session, s.segment), -1) for s in spans],
        "session": [s.session for s in spans],
        "segment": [s.segment for s in spans],
        "rows": [s.rows for s in spans],
        "useful": [s.useful for s in spans],
        "dead": [s.dead for s in spans],
        "first": [s.first for s in spans],
        "last": [s.last for s in spans],
        "peer": ["" if s.peer < 0 else name(s.peer, stages) for s in spans],
        "nbytes": [s.nbytes for s in spans],
    }


def _lifetimes(lifetimes: Sequence[SegmentLifetime], lanes: dict[int, int]) -> Columns:
    return {
        "session": [j.session for j in lifetimes],
        "segment": [j.segment for j in lifetimes],
        "nodes": [len(j.ids) for j in lifetimes],
        "first": [min(j.ids, default=-1) for j in lifetimes],
        "last": [max(j.ids, default=-1) for j in lifetimes],
        "useful": [j.useful for j in lifetimes],
        "brought": [j.brought for j in lifetimes],
        "sent": [micro(j.sent) for j in lifetimes],
        "verified": [_moment(j.verified) for j in lifetimes],
        "outcome": [j.outcome for j in lifetimes],
        # Of every stage it came to: lane; received, started, ended, sent; rows that came, were
        # computed, went on.
        "hops": [
            [
                [
                    lanes[h.rank],
                    *map(_moment, (h.received, h.started, h.ended, h.sent)),
                    *(h.came, h.computed, h.went),
                ]
                for h in j.hops
                if h.rank in lanes
            ]
            for j in lifetimes
        ],
    }


def _moment(seconds: float | None) -> int:
    return -1 if seconds is None else micro(seconds)


def _tokens(tokens: Sequence[Token]) -> Columns:
    return {
        "request": [t.request for t in tokens],
        "index": [t.index for t in tokens],
        "token": [t.token for t in tokens],
        "at": [micro(t.at) for t in tokens],
        "lifetime": [t.lifetime for t in tokens],
        "hit": [int(t.hit) for t in tokens],
        "depth": [t.depth for t in tokens],
        "text": [t.text for t in tokens],
    }


def _rounds(rounds: Sequence[Round]) -> Columns:
    return {
        "request": [r.request for r in rounds],
        "number": [r.number for r in rounds],
        "at": [micro(r.at) for r in rounds],
        "until": [micro(r.until) for r in rounds],
        "tokens": [r.tokens for r in rounds],
        "end": [r.end for r in rounds],
    }


def _instants(instants: Sequence[Instant], lanes: dict[int, int]) -> Columns:
    shown = [instant for instant in instants if instant.kind != "emit"]
    return {
        "lane": [lanes[m.rank] for m in shown],
        "at": [micro(m.at) for m in shown],
        "kind": [m.kind for m in shown],
        "text": [m.text for m in shown],
    }


def _notes(timeline: Timeline) -> list[str]:
    """How far moments of different nodes may be off."""
    return [
        f"{name(c.rank, timeline.stages)}: clock within {c.uncertainty * 1e3:.2f} ms, "
        f"drift {c.drift * 1e6:+.0f} ppm ({c.probes} probes)"
        for c in timeline.clocks
        if c.probes
    ]


def _warnings(timeline: Timeline) -> list[str]:
    return [
        f"{name(rank, timeline.stages)}: {count} lines of its recording were lost, so what they "
        "told is missing here"
        for rank, count in timeline.dropped
    ]
