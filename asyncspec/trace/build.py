"""A trace as a timeline. Pure; raises nothing for a well-formed trace, however partial."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from asyncspec.trace import records
from asyncspec.trace.answers import Answers, read_answers
from asyncspec.trace.file import Trace
from asyncspec.trace.journeys import read_journeys
from asyncspec.trace.log import Life, Log, read_log
from asyncspec.trace.marks import read_marks
from asyncspec.trace.paths import read_paths
from asyncspec.trace.spans import read_spans
from asyncspec.trace.stages import read_stage
from asyncspec.trace.timeline import Clock, Journey, Timeline, Token


def build(trace: Trace) -> Timeline:
    """Everything a trace tells, on one clock."""
    log = read_log(trace.lines)
    drafts = [life for life in log.lives if life.node.role == "draft"]
    stages = [read_stage(life) for life in log.lives if life.node.role != "draft"]
    paths = read_paths(drafts, stages)
    last = max((life.rank for life in log.lives), default=0)
    journeys = read_journeys(drafts, stages, paths, last)
    index = {(j.session, j.segment): i for i, j in enumerate(journeys)}
    answers = merge([read_answers(life, paths, index) for life in drafts])
    spans = read_spans(log, stages, paths)
    marks = read_marks(log, answers)
    ends = [*(s.until for s in spans), *(m.at for m in marks), 0.0]
    return Timeline(
        header=trace.header,
        duration=max(ends),
        nodes=tuple(life.node for life in log.lives),
        clocks=tuple(replace(c, offset=c.offset - log.zero) for c in _clocks(log)),
        requests=tuple(sorted(answers.requests.values(), key=lambda r: r.submitted)),
        spans=tuple(spans),
        journeys=tuple(_credited(journeys, answers.tokens)),
        tokens=tuple(answers.tokens),
        rounds=tuple(sorted(answers.rounds, key=lambda r: r.at)),
        marks=tuple(marks),
        traffic=tuple(_traffic(log.lives)),
        dropped=tuple(_dropped(log.lives)),
    )


def merge(parts: Sequence[Answers]) -> Answers:
    """The answers of a draft node that was started again."""
    whole = Answers()
    for part in parts:
        whole.requests |= part.requests
        whole.tokens += part.tokens
        whole.steps += part.steps
        whole.rounds += part.rounds
        whole.owners |= part.owners
    return whole


def _clocks(log: Log) -> list[Clock]:
    return [log.clocks[rank] for rank in sorted(log.clocks)]


def _credited(journeys: Sequence[Journey], tokens: Sequence[Token]) -> list[Journey]:
    """With the number of tokens each brought."""
    brought = Counter(token.journey for token in tokens)
    return [replace(journey, brought=brought[i]) for i, journey in enumerate(journeys)]


def _traffic(lives: Sequence[Life]) -> list[tuple[int, int, str, int, int]]:
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


def _dropped(lives: Sequence[Life]) -> list[tuple[int, int]]:
    lost: Counter[int] = Counter()
    for life in lives:
        for line in life.others:
            if isinstance(line, records.Dropped):
                lost[life.rank] += line.count
    return sorted(lost.items())
