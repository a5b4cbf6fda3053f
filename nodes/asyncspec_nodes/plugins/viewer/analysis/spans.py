"""What every node was busy with or waited for, and moments worth marking."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from asyncspec.core import machine
from asyncspec.trace.records import Blocked, Issued, Ran, ReceivedMessage, Sent, Silence
from asyncspec_nodes.plugins.viewer.analysis.log import Log, LogStep, NodeLog
from asyncspec_nodes.plugins.viewer.analysis.segments import Path, StageView
from asyncspec_nodes.plugins.viewer.analysis.timeline import (
    Instant,
    Round,
    SegmentLifetime,
    Span,
    Visit,
    by_time,
)
from asyncspec_protocol.ids import SessionId, owner
from asyncspec_protocol.messages import Credit, PruneIndices


def read_spans(
    log: Log,
    stages: Sequence[StageView],
    paths: Mapping[int, Path],
    lifetimes: Sequence[SegmentLifetime],
) -> list[Span]:
    """All spans of all nodes, in order of time."""
    spans: list[Span] = []
    for node in log.nodes:
        rank = node.info.rank
        spans += [Span(rank, "step", step.at, step.until) for step in node.steps]
        for line in node.others:
            match line:
                case Blocked(_, peer, at, until, nbytes):
                    spans.append(Span(rank, "send", at, until, peer=peer, nbytes=nbytes))
                case Silence(_, peer, at, until):
                    spans.append(Span(rank, "silence", at, until, peer=peer))
                case _:
                    pass
        for run in node.runs.values():
            spans += _job(node, run)
        if node.info.role == "draft":
            spans += _without_credit(node)
    for view in stages:
        for visit in view.visits.values():
            spans += _visit(visit, paths.get(visit.message.session))
    for lifetime in lifetimes:
        spans += _transfers(lifetime)
    return sorted(spans, key=by_time)


def _job(node: NodeLog, run: Ran) -> Iterator[Span]:
    """Spans of any job but a pass; a batch of trees has one per session, from its effect."""
    if run.kind in ("forward", "batch"):
        return
    kind = "cache" if run.kind in ("admit", "compact", "release", "feed") else "draft"
    parts: tuple[tuple[int, int, int], ...] = ((run.session, run.segment, run.rows),)
    if run.kind == "drafting" and run.job in node.issued:
        effects = node.issued[run.job].effects
        parts = next(e.parts for e in effects if isinstance(e, Issued) and e.job == run.job)
    for session, segment, rows in parts:
        yield Span(run.rank, kind, run.at, run.until, session, segment, rows)


def _without_credit(node: NodeLog) -> Iterator[Span]:
    """The draft node without credit, where the next credit was used at once."""
    allowed = sent = 0
    empty: float | None = None
    for step in node.steps:
        segments = [e for e in step.effects if isinstance(e, Sent) and e.kind == "segment"]
        match step.input:
            case ReceivedMessage(_, Credit(limit)):
                if empty is not None and segments:
                    name = segments[0].session, segments[0].segment
                    yield Span(node.info.rank, "credit", empty, step.at, *name)
                allowed, empty = limit, None
            case machine.LinkUp(1):
                allowed = sent = 0
            case _:
                pass
        sent += len(segments)
        if empty is None and allowed and sent >= allowed:
            empty = step.until


def _visit(visit: Visit, path: Path | None) -> Iterator[Span]:
    name = visit.message.session, visit.message.segment
    if visit.started is None or visit.ended is None:
        return
    yield Span(visit.rank, "queue", visit.received, visit.started, *name)
    useful = set() if path is None else set(filter(path.useful, visit.ids))
    useful_rows = -1 if path is None else len(useful)
    rows = len(visit.ids), useful_rows, len(visit.dead - useful)
    ends = min(visit.ids, default=-1), max(visit.ids, default=-1)
    yield Span(visit.rank, "compute", visit.started, visit.ended, *name, *rows, *ends)
    # A segment that is sent on in a later step than it ended in has waited for credit.
    if visit.result_at is not None and visit.sent is not None and visit.sent > visit.result_at:
        yield Span(visit.rank, "credit", visit.result_at, visit.sent, *name)


def _transfers(lifetime: SegmentLifetime) -> Iterator[Span]:
    """Between nodes. Where clocks are off by more than it took, it took no time."""
    draft = _draft(lifetime.session)
    ends = [(draft, lifetime.sent, None), *((h.rank, h.sent, h.received) for h in lifetime.hops)]
    ends.append((draft, None, lifetime.verified))
    name = lifetime.session, lifetime.segment
    for (rank, sent, _), (peer, _, received) in pairwise(ends):
        if sent is not None and received is not None:
            yield Span(rank, "transfer", sent, max(sent, received), *name, peer=peer)


def _draft(session: int) -> int:
    """The rank of a session's draft node."""
    return owner(SessionId(session))


def read_instants(log: Log, rounds: Sequence[Round]) -> list[Instant]:
    """All of them, in order of time."""
    instants = [one for node in log.nodes for step in node.steps for one in _of_step(step)]
    instants += [
        Instant(_draft(one.session), one.until, one.end, one.session, f"{one.tokens} tokens")
        for one in rounds
        if one.end == "miss"
    ]
    return sorted(instants, key=lambda instant: (instant.at, instant.rank))


def _of_step(step: LogStep) -> Iterator[Instant]:
    rank, at = step.rank, step.at
    if step.error:
        yield Instant(rank, at, "error", text=step.error)
    match step.input:
        case machine.Submitted(new):
            yield Instant(rank, at, "submit", text=f"request {new.request}, {new.policy}")
        case machine.LinkUp(peer):
            yield Instant(rank, at, "joined", text=f"rank {peer}")
        case machine.LinkDown(peer, reason):
            yield Instant(rank, at, "lost", text=f"rank {peer}: {reason}")
        case ReceivedMessage(_, PruneIndices(pruned_session, version, _, _, keep)):
            yield Instant(rank, at, "prune", pruned_session, f"version {version} keeps {len(keep)}")
        case _:
            pass
    pruned = False
    for effect in step.effects:
        match effect:
            case Sent(1, "open", session):
                yield Instant(rank, at, "open", session)
            case Sent(_, "prune", session, _, count) if not pruned:
                pruned = True
                yield Instant(rank, at, "prune", session, f"keeps {count}")
            case machine.Emit(request, tokens):
                yield Instant(rank, at, "emit", text=f"request {request}: {len(tokens)} tokens")
            case machine.Finish(request, reason, session):
                yield Instant(rank, at, "finish", session, f"request {request}: {reason}")
            case _:
                pass
