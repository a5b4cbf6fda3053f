"""What every node was busy with or waited for. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct

from asyncspec.core import machine
from asyncspec.trace import records
from asyncspec.trace.analysis.critical_path import name
from asyncspec.trace.analysis.log import Log, LogRun, NodeLog
from asyncspec.trace.analysis.segments import Path, StageView, Visit
from asyncspec.trace.analysis.timeline import SegmentLifetime, Span, Timeline
from asyncspec_protocol.messages import Credit

_PASSES = ("forward", "batch")
_CACHE = ("admit", "compact", "release", "feed")


def read_spans(
    log: Log,
    stages: Sequence[StageView],
    paths: Mapping[int, Path],
    lifetimes: Sequence[SegmentLifetime],
) -> list[Span]:
    """All spans of all nodes, in order of time."""
    spans: list[Span] = []
    for life in log.lives:
        spans += _steps(life)
        spans += _network(log, life)
        for run in life.runs.values():
            if run.kind not in _PASSES:
                spans += _job(life, run)
        if life.node.role == "draft":
            spans += _starved(life)
    for view in stages:
        for visit in view.visits.values():
            spans += _visit(visit, paths.get(visit.message.session))
    for lifetime in lifetimes:
        spans += _transfers(lifetime)
    return sorted(spans, key=lambda span: (span.at, span.until, span.rank))


def _steps(life: NodeLog) -> Iterator[Span]:
    for step in life.steps:
        yield Span(life.rank, "step", step.at, step.until)


def _job(life: NodeLog, run: LogRun) -> Iterator[Span]:
    """The time of a batch of trees is the time of each of its sessions."""
    kind = "cache" if run.kind in _CACHE else "draft"
    for session, segment, rows in _parts(life, run):
        yield Span(life.rank, kind, run.at, run.until, session, segment, rows)


def _parts(life: NodeLog, run: LogRun) -> tuple[tuple[int, int, int], ...]:
    """Session, segment and rows of a job, or of each tree of a batch: only its issue says them."""
    index = life.issued.get(run.job)
    if run.kind == "drafting" and index is not None:
        for effect in life.steps[index].effects:
            if isinstance(effect, records.Issued) and effect.job == run.job:
                return effect.parts
    return ((run.session, run.segment, run.rows),)


def _network(log: Log, life: NodeLog) -> Iterator[Span]:
    for line in life.others:
        match line:
            case records.Blocked(rank, peer, at, until, nbytes):
                at, until = log.time(rank, at), log.time(rank, until)
                yield Span(rank, "send", at, until, peer=peer, nbytes=nbytes)
            case records.Silence(rank, peer, at, until):
                at, until = log.time(rank, at), log.time(rank, until)
                yield Span(rank, "silence", at, until, peer=peer)
            case _:
                pass


def _starved(life: NodeLog) -> Iterator[Span]:
    """The draft node without credit, where the next credit was used at once."""
    allowed = sent = 0
    empty: float | None = None
    for step in life.steps:
        segments = [e for e in step.effects if isinstance(e, records.Sent) and e.kind == "segment"]
        match step.input:
            case records.ReceivedMessage(_, Credit(limit)):
                if empty is not None and segments:
                    last = segments[0]
                    yield Span(life.rank, "credit", empty, step.at, last.session, last.segment)
                allowed = limit
                empty = None
            case machine.LinkUp(1):
                allowed = sent = 0
            case _:
                pass
        sent += len(segments)
        if empty is None and allowed and sent >= allowed:
            empty = step.until


def _visit(visit: Visit, path: Path | None) -> Iterator[Span]:
    message = visit.message
    name = (message.session, message.segment)
    if visit.started is None or visit.ended is None:
        return
    yield Span(visit.rank, "queue", visit.received, visit.started, *name)
    useful = {n for n in visit.ids if path is not None and path.useful(n)}
    yield Span(
        visit.rank,
        "compute",
        visit.started,
        visit.ended,
        *name,
        rows=len(visit.ids),
        useful=len(useful),
        dead=len(visit.dead - useful),
        first=min(visit.ids, default=-1),
        last=max(visit.ids, default=-1),
    )
    # A segment that is sent on in a later step than it ended in has waited for credit.
    if visit.told is not None and visit.sent is not None and visit.sent > visit.told:
        yield Span(visit.rank, "credit", visit.told, visit.sent, *name)


def _transfers(lifetime: SegmentLifetime) -> Iterator[Span]:
    """From hand to hand. Where clocks are off by more than it took, it took no time."""
    ends = [(0, lifetime.sent, None), *((h.rank, h.sent, h.received) for h in lifetime.hops)]
    ends.append((0, None, lifetime.verified))
    name = (lifetime.session, lifetime.segment)
    for (rank, sent, _), (peer, _, received) in pairwise(ends):
        if sent is not None and received is not None:
            yield Span(rank, "transfer", sent, max(sent, received), *name, peer=peer)


# --- How each device spent the time in which requests ran. Pure.

Interval = tuple[float, float]


class Utilisation(Struct, frozen=True):
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


def read_utilisation(timeline: Timeline) -> tuple[Utilisation, ...]:
    """One for every node."""
    windows = union((r.submitted, r.finished or timeline.duration) for r in timeline.requests)
    ranks = sorted({node.rank for node in timeline.nodes})
    spans: dict[int, list[Span]] = {rank: [] for rank in ranks}
    for span in timeline.spans:
        spans.setdefault(span.rank, []).append(span)
    stages = timeline.stages
    return tuple(_utilisation(rank, name(rank, stages), spans[rank], windows) for rank in ranks)


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
    useful, dead = _split(spans, windows)
    busy = part["compute"] + part["draft"] + part["cache"]
    return Utilisation(
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
