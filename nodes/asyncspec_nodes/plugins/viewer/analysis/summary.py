"""A trace in numbers: what devices were busy with, where tokens' time went, and the bottleneck."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct

from asyncspec.policy.flow.policy import describe
from asyncspec.trace.records import Reported, Sent
from asyncspec_nodes.plugins.viewer.analysis.critical_path import (
    LatencyBreakdown,
    latency_breakdowns,
    link_name,
    token_times,
)
from asyncspec_nodes.plugins.viewer.analysis.log import ClockFit
from asyncspec_nodes.plugins.viewer.analysis.timeline import SegmentLifetime, Span, Timeline

Interval = tuple[float, float]


class Utilisation(Struct, frozen=True):
    """Shares of the time in which requests ran; the last nine sum to 1.

    ``useful``, ``wrong``, ``dead`` and ``unknown`` split the time of passes by their rows: of nodes
    that ended on the committed path, of wrong guesses, of nodes dead before the pass had ended, and
    of nodes of which nothing that was recorded tells.
    """

    rank: int
    device: str
    busy: float
    useful: float
    wrong: float
    dead: float
    unknown: float
    drafting: float
    cache: float
    # Nothing to compute: bytes waited for the network, a finished segment for the next stage's
    # credit (on the draft node: something to send for the first stage's), or nothing had come.
    sending: float
    credit: float
    idle: float


class Depth(Struct, frozen=True):
    """Hits among the ``tokens`` that came at one depth below the tip: nodes of the tree."""

    depth: int
    tokens: int
    hits: int


class HopBytes(Struct, frozen=True):
    """What one link carried in one direction."""

    hop: str
    frames: int
    nbytes: int
    bytes_per_token: float


class Summary(Struct, frozen=True):
    """Seconds. ``requests`` breaks down whole answers, ``decoding`` all tokens but the first."""

    # What the policy did and why; empty where it does not say.
    speculation: str
    bottleneck: str
    duration: float
    tokens: int
    rounds: int
    misses: int
    tokens_per_round: float
    hit_rate: float
    # Mean number of rows between being sent and being verified, pruned or lost, while requests ran.
    rows_in_flight: float
    devices: tuple[Utilisation, ...]
    requests: tuple[LatencyBreakdown, ...]
    decoding: tuple[LatencyBreakdown, ...]
    acceptance: tuple[Depth, ...]
    hops: tuple[HopBytes, ...]
    clocks: tuple[ClockFit, ...]
    dropped: tuple[tuple[int, int], ...]


def summarise(timeline: Timeline) -> Summary:
    times = token_times(timeline)
    requests = latency_breakdowns(times, decoding=False)
    decoding = latency_breakdowns(times, decoding=True)
    windows = union((r.submitted, r.finished or timeline.duration) for r in timeline.requests)
    spans: dict[int, list[Span]] = {node.rank: [] for node in timeline.nodes}
    for span in timeline.spans:
        spans.setdefault(span.rank, []).append(span)
    ranks = sorted({node.rank for node in timeline.nodes})
    devices = [_utilisation(rank, timeline.name(rank), spans[rank], windows) for rank in ranks]
    later = [token for token in timeline.tokens if token.index]
    depths, hits = Counter(t.depth for t in later), Counter(t.depth for t in later if t.hit)
    rounds, ran = len(timeline.rounds), length(windows)
    in_flight = sum(_row_seconds(one, windows) for one in timeline.lifetimes)
    reasons = [describe(request.stats) for request in timeline.requests]
    return Summary(
        speculation=next((f"{one[0].upper()}{one[1:]}." for one in reversed(reasons) if one), ""),
        bottleneck=f"{bottleneck(decoding or requests, devices)} {timeline.without_path}".rstrip(),
        duration=timeline.duration,
        tokens=len(timeline.tokens),
        rounds=rounds,
        misses=sum(r.end == "miss" for r in timeline.rounds),
        tokens_per_round=len(later) / rounds if rounds else 0.0,
        hit_rate=hits.total() / len(later) if later else 0.0,
        rows_in_flight=in_flight / ran if ran else 0.0,
        devices=tuple(devices),
        requests=tuple(requests),
        decoding=tuple(decoding),
        acceptance=tuple(Depth(depth, depths[depth], hits[depth]) for depth in sorted(depths)),
        hops=_hops(timeline),
        clocks=timeline.clocks,
        dropped=timeline.dropped,
    )


def bottleneck(requests: Sequence[LatencyBreakdown], devices: Sequence[Utilisation]) -> str:
    """The resource whose work the tokens waited for most, in one sentence."""
    blame: Counter[str] = Counter()
    for breakdown in requests:
        blame.update(breakdown.resources)
    blame.pop("other", None)
    total = sum(breakdown.seconds for breakdown in requests)
    if not blame or not total:
        return "Nothing was decoded, so nothing held it up."
    resource, seconds = blame.most_common(1)[0]
    share = f"{seconds / total:.0%} of the tokens' time"
    device = next((d for d in devices if d.device == resource), None)
    if device is None:
        return f"The link {resource} is the bottleneck: {share} was spent on it."
    sentence = f"{resource} is the bottleneck: {share} was its work; it was busy {device.busy:.0%}"
    classified = device.useful + device.wrong + device.dead
    if not classified:
        return f"{sentence}."
    passes = classified + device.unknown
    return (
        f"{sentence}, {device.dead / passes:.0%} of its passes on dead rows and "
        f"{device.wrong / passes:.0%} on wrong guesses."
    )


def _utilisation(
    rank: int, device: str, spans: Sequence[Span], windows: Sequence[Interval]
) -> Utilisation:
    total = length(windows) or 1.0
    taken: list[Interval] = []
    part: dict[str, float] = {}
    for kind in ("compute", "draft", "cache", "send", "credit"):
        grown = union([*taken, *((s.at, s.until) for s in spans if s.kind == kind)])
        part[kind] = (length(cut(grown, windows)) - length(cut(taken, windows))) / total
        taken = grown
    useful, wrong, dead, unknown = _split(spans, windows)
    return Utilisation(
        rank,
        device,
        busy=part["compute"] + part["draft"] + part["cache"],
        useful=part["compute"] * useful,
        wrong=part["compute"] * wrong,
        dead=part["compute"] * dead,
        unknown=part["compute"] * unknown,
        drafting=part["draft"],
        cache=part["cache"],
        sending=part["send"],
        credit=part["credit"],
        idle=max(0.0, 1 - sum(part.values())),
    )


def _split(spans: Sequence[Span], windows: Sequence[Interval]) -> tuple[float, ...]:
    """Shares of the time of passes that went into useful, wrong, dead and unknown rows."""
    # Rows of each kind in a pass, by its time: sessions may share one.
    passes: dict[Interval, tuple[int, ...]] = {}
    for span in spans:
        if span.kind == "compute":
            counts = (0, 0, 0, span.rows)
            if span.useful >= 0:
                counts = (span.useful, span.rows - span.useful - span.dead, span.dead, 0)
            previous = passes.get((span.at, span.until), (0, 0, 0, 0))
            passes[span.at, span.until] = tuple(map(sum, zip(previous, counts, strict=True)))
    seconds = [0.0] * 4
    for interval, rows in passes.items():
        # Nothing is known of a pass without rows.
        shares = rows if any(rows) else (0, 0, 0, 1)
        row_seconds = length(cut([interval], windows)) / sum(shares)
        seconds = [had + row_seconds * share for had, share in zip(seconds, shares, strict=True)]
    total = sum(seconds) or 1.0
    return tuple(one / total for one in seconds)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint and ascending."""
    merged: list[Interval] = []
    for at, until in sorted(intervals):
        if merged and at <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], until))
        elif until > at:
            merged.append((at, until))
    return merged


def cut(intervals: Sequence[Interval], windows: Sequence[Interval]) -> list[Interval]:
    """What of disjoint ascending intervals lies in disjoint ascending windows."""
    parts: list[Interval] = []
    start = 0
    for at, until in intervals:
        while start < len(windows) and windows[start][1] <= at:
            start += 1
        for low, high in windows[start:]:
            if low >= until:
                break
            parts.append((max(at, low), min(until, high)))
    return parts


def length(intervals: Iterable[Interval]) -> float:
    """Seconds in all."""
    return sum(until - at for at, until in intervals)


def _row_seconds(lifetime: SegmentLifetime, windows: Sequence[Interval]) -> float:
    """Rows of a segment times the seconds until its verdict, or until it was last seen."""
    moments = [lifetime.sent]
    for hop in lifetime.hops:
        moments += [t for t in (hop.received, hop.ended, hop.sent) if t is not None]
    end = max(moments) if lifetime.verified is None else lifetime.verified
    return len(lifetime.ids) * length(cut([(lifetime.sent, end)], windows))


def _hops(timeline: Timeline) -> tuple[HopBytes, ...]:
    frames: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for node in timeline.log.nodes:
        for effect in (effect for step in node.steps for effect in step.effects):
            if isinstance(effect, Sent | Reported) and effect.nbytes:
                hop = link_name(node.info.rank, effect.to, timeline.stages)
                frames[hop] += 1
                nbytes[hop] += effect.nbytes
    tokens = len(timeline.tokens) or 1
    return tuple(HopBytes(h, frames[h], nbytes[h], nbytes[h] / tokens) for h in sorted(frames))
