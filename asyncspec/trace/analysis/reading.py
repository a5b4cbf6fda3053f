"""A trace understood: what all readers of it share. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from asyncspec.trace.analysis.answers import Answers, read_answers
from asyncspec.trace.analysis.log import Log, read_log
from asyncspec.trace.analysis.segments import (
    Path,
    StageView,
    read_lifetimes,
    read_paths,
    read_stage,
)
from asyncspec.trace.analysis.timeline import SegmentLifetime
from asyncspec.trace.records import Header, Trace


class Reading(Struct, frozen=True):
    """Who did what, which of it ended in the answer, and what users got."""

    header: Header
    log: Log
    stages: Sequence[StageView]
    # By session.
    paths: Mapping[int, Path]
    lifetimes: Sequence[SegmentLifetime]
    answers: Answers


def read(trace: Trace) -> Reading:
    """Raises nothing for a well-formed trace, however partial."""
    log = read_log(trace.lines)
    drafts = [life for life in log.lives if life.node.role == "draft"]
    stages = [read_stage(life) for life in log.lives if life.node.role == "verify"]
    paths = read_paths(drafts, stages)
    last = max((view.life.rank for view in stages), default=0)
    lifetimes = read_lifetimes(drafts, stages, paths, last)
    index = {(j.session, j.segment): i for i, j in enumerate(lifetimes)}
    seen = _first_seen(log, lifetimes)
    answers = _merge([read_answers(life, paths, index, seen) for life in drafts])
    return Reading(trace.header, log, stages, paths, lifetimes, answers)


def _first_seen(log: Log, lifetimes: Sequence[SegmentLifetime]) -> dict[int, float]:
    """When any node worked on a session first, or had a segment of it."""
    seen: dict[int, float] = {}
    jobs = [(run.session, run.at) for life in log.lives for run in life.runs.values()]
    for session, at in (*jobs, *((j.session, j.sent) for j in lifetimes)):
        seen[session] = min(at, seen.get(session, at))
    return seen


def _merge(parts: Sequence[Answers]) -> Answers:
    """The answers of a draft node that was started again."""
    whole = Answers()
    for part in parts:
        whole.requests |= part.requests
        whole.tokens += part.tokens
        whole.steps += part.steps
        whole.rounds += part.rounds
        whole.owners |= part.owners
    return whole
