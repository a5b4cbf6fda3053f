"""What every node was busy with or waited for. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from asyncspec.trace import records
from asyncspec.trace.log import Life, Log, LogRun
from asyncspec.trace.paths import Path
from asyncspec.trace.stages import StageView, Visit
from asyncspec.trace.timeline import Journey, Span
from asyncspec_protocol.messages import Credit

_PASSES = ("forward", "batch")
_CACHE = ("admit", "compact", "release", "feed")


def read_spans(
    log: Log,
    stages: Sequence[StageView],
    paths: Mapping[int, Path],
    journeys: Sequence[Journey],
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
    for journey in journeys:
        spans += _transfers(journey)
    return sorted(spans, key=lambda span: (span.at, span.until, span.rank))


def _steps(life: Life) -> Iterator[Span]:
    for step in life.steps:
        yield Span(life.rank, "step", step.at, step.until)


def _job(life: Life, run: LogRun) -> Iterator[Span]:
    """The time of a batch of trees is the time of each of its sessions."""
    kind = "cache" if run.kind in _CACHE else "draft"
    for session, segment, rows in _parts(life, run):
        yield Span(life.rank, kind, run.at, run.until, session, segment, rows)


def _parts(life: Life, run: LogRun) -> tuple[tuple[int, int, int], ...]:
    """Session, segment and rows of a job, or of each tree of a batch: only its issue says them."""
    index = life.issued.get(run.job)
    if run.kind == "drafting" and index is not None:
        for effect in life.steps[index].effects:
            if isinstance(effect, records.Issued) and effect.job == run.job:
                return effect.parts
    return ((run.session, run.segment, run.rows),)


def _network(log: Log, life: Life) -> Iterator[Span]:
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


def _starved(life: Life) -> Iterator[Span]:
    """The draft node without credit, where the next credit was used at once."""
    allowed = sent = 0
    empty: float | None = None
    for step in life.steps:
        segments = [e for e in step.effects if isinstance(e, records.Sent) and e.kind == "segment"]
        match step.input:
            case records.Received(_, Credit(limit)):
                if empty is not None and segments:
                    last = segments[0]
                    yield Span(life.rank, "credit", empty, step.at, last.session, last.segment)
                allowed = limit
                empty = None
            case records.Joined(1):
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


def _transfers(journey: Journey) -> Iterator[Span]:
    """From hand to hand. Where clocks are off by more than it took, it took no time."""
    ends = [(0, journey.sent, None), *((h.rank, h.sent, h.received) for h in journey.hops)]
    ends.append((0, None, journey.judged))
    name = (journey.session, journey.segment)
    for (rank, sent, _), (peer, _, received) in pairwise(ends):
        if sent is not None and received is not None:
            yield Span(rank, "transfer", sent, max(sent, received), *name, peer=peer)
