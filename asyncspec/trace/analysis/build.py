"""A trace as a timeline; raises nothing for a well-formed trace, however partial."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from msgspec.structs import replace

from asyncspec.trace.analysis.answers import Answers
from asyncspec.trace.analysis.log import Log, read_log
from asyncspec.trace.analysis.segments import StageView, read_segments
from asyncspec.trace.analysis.spans import read_instants, read_spans
from asyncspec.trace.analysis.timeline import Request, SegmentLifetime, Timeline
from asyncspec.trace.records import Dropped, Reported, Sent, Trace


def build(trace: Trace) -> Timeline:
    """Everything a trace says, on one clock."""
    log = read_log(trace.lines)
    drafts = [life for life in log.lives if life.node.role == "draft"]
    stages = [StageView(life) for life in log.lives if life.node.role == "verify"]
    paths, lifetimes = read_segments(drafts, stages)
    index = {(one.session, one.segment): i for i, one in enumerate(lifetimes)}
    seen = _first_seen(log, lifetimes)
    answers = [Answers(life, paths, index, seen) for life in drafts]
    requests: dict[int, Request] = {}
    for part in answers:
        requests |= part.requests
    tokens = tuple(chain.from_iterable(part.tokens for part in answers))
    rounds = list(chain.from_iterable(part.rounds for part in answers))
    brought = Counter(token.lifetime for token in tokens)
    spans = read_spans(log, stages, paths, lifetimes)
    instants = read_instants(log, rounds)
    return Timeline(
        header=trace.header,
        duration=max([*(s.until for s in spans), *(m.at for m in instants), 0.0]),
        nodes=tuple(life.node for life in log.lives),
        clocks=tuple(log.clocks.values()),
        requests=tuple(sorted(requests.values(), key=lambda r: r.submitted)),
        spans=tuple(spans),
        lifetimes=tuple(replace(one, brought=brought[i]) for i, one in enumerate(lifetimes)),
        tokens=tokens,
        rounds=tuple(sorted(rounds, key=lambda r: r.at)),
        instants=tuple(instants),
        traffic=_traffic(log),
        dropped=_dropped(log),
        log=log,
        emissions=tuple(chain.from_iterable(part.steps for part in answers)),
    )


def _first_seen(log: Log, lifetimes: Sequence[SegmentLifetime]) -> dict[int, float]:
    """When any node first worked on a session, or had a segment of it."""
    seen: dict[int, float] = {}
    jobs = [(run.session, run.at) for life in log.lives for run in life.runs.values()]
    for session, at in (*jobs, *((one.session, one.sent) for one in lifetimes)):
        seen[session] = min(at, seen.get(session, at))
    return seen


def _traffic(log: Log) -> tuple[tuple[int, int, str, int, int], ...]:
    frames: Counter[tuple[int, int, str]] = Counter()
    nbytes: Counter[tuple[int, int, str]] = Counter()
    for life in log.lives:
        for effect in (effect for step in life.steps for effect in step.effects):
            if isinstance(effect, Sent | Reported) and effect.nbytes:
                kind = effect.kind if isinstance(effect, Sent) else "closed"
                hop = life.node.rank, effect.to, kind
                frames[hop] += 1
                nbytes[hop] += effect.nbytes
    return tuple((*hop, frames[hop], nbytes[hop]) for hop in sorted(frames))


def _dropped(log: Log) -> tuple[tuple[int, int], ...]:
    lost: Counter[int] = Counter()
    for line in (line for life in log.lives for line in life.others):
        if isinstance(line, Dropped):
            lost[line.rank] += line.count
    return tuple(sorted(lost.items()))
