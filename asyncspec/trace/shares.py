"""How each device spent the time in which requests ran. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from asyncspec.trace.critical import name
from asyncspec.trace.timeline import Span, Timeline

Interval = tuple[float, float]


class Share(Struct, frozen=True):
    """Shares of the time in which requests ran; the last eight sum to 1.

    ``useful``, ``wrong`` and ``dead`` split the time of passes by their rows: of nodes that ended
    on the committed path, of wrong guesses, and of nodes dead before the pass had ended.
    """

    rank: int
    device: str
    busy: float
    useful: float
    wrong: float
    dead: float
    drafting: float
    cache: float
    # Nothing to compute: bytes waited for the network, a finished segment for the next stage's
    # credit (on the draft node: something to send for the first stage's), or nothing had come.
    sending: float
    credit: float
    idle: float


def read_shares(timeline: Timeline) -> tuple[Share, ...]:
    """One for every node."""
    windows = union((r.submitted, r.finished or timeline.duration) for r in timeline.requests)
    ranks = sorted({node.rank for node in timeline.nodes})
    spans: dict[int, list[Span]] = {rank: [] for rank in ranks}
    for span in timeline.spans:
        spans.setdefault(span.rank, []).append(span)
    stages = timeline.stages
    return tuple(_share(rank, name(rank, stages), spans[rank], windows) for rank in ranks)


def _share(rank: int, device: str, spans: Sequence[Span], windows: Sequence[Interval]) -> Share:
    total = length(windows) or 1.0
    taken: list[Interval] = []
    part: dict[str, float] = {}
    for kind in ("compute", "draft", "cache", "send", "credit"):
        grown = union([*taken, *((s.at, s.until) for s in spans if s.kind == kind)])
        part[kind] = (length(cut(grown, windows)) - length(cut(taken, windows))) / total
        taken = grown
    useful, dead = _split(spans, windows)
    busy = part["compute"] + part["draft"] + part["cache"]
    return Share(
        rank,
        device,
        busy,
        useful=part["compute"] * useful,
        wrong=part["compute"] * (1 - useful - dead),
        dead=part["compute"] * dead,
        drafting=part["draft"],
        cache=part["cache"],
        sending=part["send"],
        credit=part["credit"],
        idle=max(0.0, 1 - sum(part.values())),
    )


def _split(spans: Sequence[Span], windows: Sequence[Interval]) -> tuple[float, float]:
    """Shares of the time of passes that went into useful and into dead rows."""
    # Rows in all, useful and dead ones of each pass, by its time: sessions may share one.
    passes: dict[Interval, tuple[int, int, int]] = {}
    for span in spans:
        if span.kind == "compute" and span.rows:
            rows, useful, dead = passes.get((span.at, span.until), (0, 0, 0))
            own = (rows + span.rows, useful + span.useful, dead + span.dead)
            passes[span.at, span.until] = own
    times = [length(cut([interval], windows)) for interval in passes]
    total = sum(times) or 1.0
    useful_time = sum(t * of[1] / of[0] for t, of in zip(times, passes.values(), strict=True))
    dead_time = sum(t * of[2] / of[0] for t, of in zip(times, passes.values(), strict=True))
    # Without passes nothing is wrong either.
    return (useful_time / total, dead_time / total) if passes else (1.0, 0.0)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint and ascending."""
    found: list[Interval] = []
    for at, until in sorted(intervals):
        if found and at <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], until))
        elif until > at:
            found.append((at, until))
    return found


def cut(intervals: Sequence[Interval], windows: Sequence[Interval]) -> list[Interval]:
    """What of disjoint ascending intervals lies in disjoint ascending windows."""
    found: list[Interval] = []
    start = 0
    for at, until in intervals:
        while start < len(windows) and windows[start][1] <= at:
            start += 1
        for low, high in windows[start:]:
            if low >= until:
                break
            found.append((max(at, low), min(until, high)))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Seconds in all."""
    return sum(until - at for at, until in intervals)
