"""A trace as a timeline. Pure; raises nothing for a well-formed trace, however partial."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from asyncspec.trace import records
from asyncspec.trace.analysis.answers import read_instants
from asyncspec.trace.analysis.log import NodeLog
from asyncspec.trace.analysis.reading import Reading, read
from asyncspec.trace.analysis.spans import read_spans
from asyncspec.trace.analysis.timeline import SegmentLifetime, Timeline, Token
from asyncspec.trace.records import Trace


def build(trace: Trace) -> Timeline:
    """Everything a trace tells, on one clock."""
    return timeline(read(trace))


def timeline(reading: Reading) -> Timeline:
    """A reading as a timeline."""
    log, answers = reading.log, reading.answers
    spans = read_spans(log, reading.stages, reading.paths, reading.lifetimes)
    instants = read_instants(log, answers)
    ends = [*(s.until for s in spans), *(m.at for m in instants), 0.0]
    return Timeline(
        header=reading.header,
        duration=max(ends),
        nodes=tuple(life.node for life in log.lives),
        clocks=tuple(log.clocks[rank] for rank in sorted(log.clocks)),
        requests=tuple(sorted(answers.requests.values(), key=lambda r: r.submitted)),
        spans=tuple(spans),
        lifetimes=tuple(_credited(reading.lifetimes, answers.tokens)),
        tokens=tuple(answers.tokens),
        rounds=tuple(sorted(answers.rounds, key=lambda r: r.at)),
        instants=tuple(instants),
        traffic=tuple(_traffic(log.lives)),
        dropped=tuple(_dropped(log.lives)),
    )


def _credited(
    lifetimes: Sequence[SegmentLifetime], tokens: Sequence[Token]
) -> list[SegmentLifetime]:
    """With the number of tokens each brought."""
    brought = Counter(token.lifetime for token in tokens)
    return [replace(lifetime, brought=brought[i]) for i, lifetime in enumerate(lifetimes)]


def _traffic(lives: Sequence[NodeLog]) -> list[tuple[int, int, str, int, int]]:
    frames: Counter[tuple[int, int, str]] = Counter()
    nbytes: Counter[tuple[int, int, str]] = Counter()
    for life in lives:
        for step in life.steps:
            for effect in step.effects:
                match effect:
                    case records.Sent(to, kind, _, _, _, size) if size:
                        hop = (life.rank, to, kind)
                    case records.Reported(to, _, _, _, _, size) if size:
                        hop = (life.rank, to, "closed")
                    case _:
                        continue
                frames[hop] += 1
                nbytes[hop] += size
    return [(*hop, frames[hop], nbytes[hop]) for hop in sorted(frames)]


def _dropped(lives: Sequence[NodeLog]) -> list[tuple[int, int]]:
    lost: Counter[int] = Counter()
    for life in lives:
        for line in life.others:
            if isinstance(line, records.Dropped):
                lost[life.rank] += line.count
    return sorted(lost.items())
