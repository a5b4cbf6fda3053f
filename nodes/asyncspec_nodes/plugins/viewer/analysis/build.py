"""A trace as a timeline; raises nothing for a well-formed trace, however partial."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from msgspec.structs import replace

from asyncspec.core import machine
from asyncspec.trace.records import Dropped, Text, Trace
from asyncspec_nodes.plugins.viewer.analysis.log import Log, LogStep, NodeLog, read_log
from asyncspec_nodes.plugins.viewer.analysis.segments import Name, Path, StageView, read_segments
from asyncspec_nodes.plugins.viewer.analysis.spans import read_instants, read_spans
from asyncspec_nodes.plugins.viewer.analysis.timeline import (
    RequestTimes,
    Round,
    SegmentLifetime,
    Timeline,
    Token,
)


def build(trace: Trace) -> Timeline:
    log = read_log(trace.lines)
    drafts = [node for node in log.nodes if node.info.role == "draft"]
    stages = [StageView(node) for node in log.nodes if node.info.role == "verify"]
    paths, lifetimes = read_segments(drafts, stages)
    index = {(one.session, one.segment): i for i, one in enumerate(lifetimes)}
    seen = _first_seen(log, lifetimes)
    answers = [_Answers(node, paths, index, seen) for node in drafts]
    requests: dict[int, RequestTimes] = {}
    for part in answers:
        requests |= part.requests
    tokens = tuple(chain.from_iterable(part.tokens for part in answers))
    rounds = list(chain.from_iterable(part.rounds for part in answers))
    emitted = Counter(token.lifetime for token in tokens)
    spans = read_spans(log, stages, paths, lifetimes)
    instants = read_instants(log, rounds)
    return Timeline(
        header=trace.header,
        duration=max([*(s.until for s in spans), *(m.at for m in instants), 0.0]),
        nodes=tuple(node.info for node in log.nodes),
        clocks=tuple(log.clocks.values()),
        requests=tuple(sorted(requests.values(), key=lambda r: r.submitted)),
        spans=tuple(spans),
        lifetimes=tuple(replace(one, emitted=emitted[i]) for i, one in enumerate(lifetimes)),
        tokens=tokens,
        rounds=tuple(sorted(rounds, key=lambda r: r.at)),
        instants=tuple(instants),
        dropped=_dropped(log),
        log=log,
    )


def _first_seen(log: Log, lifetimes: Sequence[SegmentLifetime]) -> dict[int, float]:
    """When any node first worked on a session, or had a segment of it."""
    seen: dict[int, float] = {}
    jobs = [(run.session, run.at) for node in log.nodes for run in node.runs.values()]
    for session, at in (*jobs, *((one.session, one.sent) for one in lifetimes)):
        seen[session] = min(at, seen.get(session, at))
    return seen


def _dropped(log: Log) -> tuple[tuple[int, int], ...]:
    lost: Counter[int] = Counter()
    for line in (line for node in log.nodes for line in node.others):
        if isinstance(line, Dropped):
            lost[line.rank] += line.count
    return tuple(sorted(lost.items()))


@dataclass
class _Progress:
    """A session: tokens in all, and the open round."""

    request: int
    started: float
    done: int = 0
    tokens: int = 0
    rounds: int = 0


class _Answers:
    """Requests, tokens and rounds of one draft node.

    ``lifetimes``: index of a segment's lifetime; ``seen``: when any node first worked on a session.
    """

    def __init__(
        self,
        node: NodeLog,
        paths: Mapping[int, Path],
        lifetimes: Mapping[Name, int],
        seen: Mapping[int, float],
    ) -> None:
        self._paths, self._lifetimes, self._seen = paths, lifetimes, seen
        self._start = node.steps[0].at if node.steps else 0.0
        self._progress: dict[int, _Progress] = {}
        self.requests: dict[int, RequestTimes] = {}
        self.tokens: list[Token] = []
        self.rounds: list[Round] = []
        emitted: Counter[int] = Counter()
        for step in node.steps:
            if isinstance(step.input, machine.Submitted):
                number, policy = step.input.request.request, step.input.request.policy
                self.requests[number] = RequestTimes(number, step.at, policy=policy)
            for effect in step.effects:
                match effect:
                    case machine.Emit(request, tokens):
                        self._emitted(step, effect, emitted[request])
                        emitted[request] += len(tokens)
                    case machine.Finish(request, reason, session, stats):
                        old = self._request(request, session)
                        self.requests[request] = replace(
                            old, finished=step.at, reason=reason, stats=stats
                        )
                        if session in self._progress and self._progress[session].tokens:
                            self._end_round(session, step.at, "finish")
                    case _:
                        pass
        self._texts([line for line in node.others if isinstance(line, Text)])

    def _request(self, request: int, session: int) -> RequestTimes:
        """A request. One that was submitted before the recording began counts from the first step
        of the draft node, or of another node that worked on it before."""
        submitted = min(self._start, self._seen.get(session, self._start))
        return self.requests.get(request) or RequestTimes(request, submitted)

    def _emitted(self, step: LogStep, emitted: machine.Emit, start: int) -> None:
        """Add tokens with the segments whose verdicts brought them. A token that was no node ends a
        round; the one after the prompt begins the first."""
        request, session = emitted.request, emitted.session
        self.requests[request] = self._request(request, session)
        progress = self._progress.setdefault(session, _Progress(request, step.at))
        segments = self._paths.get(session, Path()).segments[progress.done :]
        first = not progress.done
        for depth, token in enumerate(emitted.tokens):
            segment = segments[depth] if depth < len(segments) else -1
            lifetime = self._lifetimes.get((session, segment), -1)
            hit = depth < emitted.hits
            self.tokens.append(Token(request, start + depth, token, step.at, lifetime, hit, depth))
        progress.done += len(emitted.tokens)
        progress.tokens += len(emitted.tokens)
        if first:
            progress.started, progress.tokens = step.at, 0
        elif emitted.hits < len(emitted.tokens):
            self._end_round(session, step.at, "miss")

    def _end_round(self, session: int, at: float, end: str) -> None:
        was = self._progress[session]
        self.rounds.append(
            Round(was.request, session, was.rounds, was.started, at, was.tokens, end)
        )
        was.rounds += 1
        was.started, was.tokens = at, 0

    def _texts(self, texts: list[Text]) -> None:
        """Add recorded text; that of several tokens belongs to the first of them."""
        places = {(token.request, token.index): i for i, token in enumerate(self.tokens)}
        count: Counter[int] = Counter()
        for line in texts:
            start = count[line.request]
            count[line.request] += len(line.tokens)
            place = places.get((line.request, start if line.tokens else start - 1))
            if place is not None:
                old = self.tokens[place]
                self.tokens[place] = replace(old, text=old.text + line.text)
