"""Where the time of each token went: the chain of causes from its emission to the one before.

The cause of a step is the step that sent the message it received, or that issued the job that
ended. Causes form one unbroken chain through all nodes; each span of it is the work of one
resource, and the spans of a token sum to its time. Waiting shows as the work that it waited for; a
span without a known cause is "other".
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.machine import Emit
from asyncspec.trace.records import JobResult, Ran, ReceivedMessage, Sent, checksum
from asyncspec_nodes.plugins.viewer.analysis.log import Log, LogStep
from asyncspec_nodes.plugins.viewer.analysis.timeline import Timeline, device_name

_LOOK_AHEAD = 1024
"""Messages of a link that may be missing between two that are there."""

_KINDS = {"forward": "compute", "batch": "compute", "expand": "draft", "drafting": "draft"}


Cause = tuple[LogStep, Ran | None]
"""The step before, and the job between them where there is one."""


class PathSpan(Struct, frozen=True):
    """Part of a token's time. ``kind``: "compute", "draft", "cache" (jobs on a node's device),
    "device" (a job waits for the device or its thread), "link" (from one node to another), "step"
    (a node's machine and event loop), "other"."""

    kind: str
    # "V2", "D0", "source", "V1 -> V2" or "other".
    resource: str
    at: float
    until: float

    @property
    def seconds(self) -> float:
        return self.until - self.at


class TokenTime(Struct, frozen=True):
    """One emission, and the spans since the one before (or since the request was submitted), latest
    first. ``index``: of its first token."""

    request: int
    index: int
    at: float
    until: float
    spans: tuple[PathSpan, ...]


class LatencyBreakdown(Struct, frozen=True):
    """A request's seconds by resource and by "resource kind", from ``since`` to its last token."""

    request: int
    since: float
    seconds: float
    resources: dict[str, float]
    kinds: dict[str, float]


def link_name(source: int, target: int, stages: int) -> str:
    return f"{device_name(source, stages)} -> {device_name(target, stages)}"


def causes(log: Log) -> dict[LogStep, Cause]:
    """The cause of every step that has one in the trace.

    Messages are matched by sender, receiver and checksum in the order of the link, so messages lost
    with a link make no wrong pairs.
    """
    sent: defaultdict[tuple[int, int], deque[tuple[int, LogStep]]] = defaultdict(deque)
    for node in log.nodes:
        for step in node.steps:
            for effect in step.effects:
                if isinstance(effect, Sent) and effect.nbytes:
                    sent[node.info.rank, effect.to].append((effect.check, step))
    causes_by_step: dict[LogStep, Cause] = {}
    for node in log.nodes:
        for step in node.steps:
            match step.input:
                case ReceivedMessage(peer, message):
                    sender = _take(sent[peer, node.info.rank], checksum(message))
                    if sender is not None:
                        causes_by_step[step] = sender, None
                case JobResult(job) if job in node.issued:
                    causes_by_step[step] = node.issued[job], node.runs.get(job)
                case _:
                    pass
    return causes_by_step


def _take(link: deque[tuple[int, LogStep]], check: int) -> LogStep | None:
    """The next message of a link with this checksum; those before it were lost."""
    for place, (number, step) in enumerate(islice(link, _LOOK_AHEAD + 1)):
        if number == check:
            for _ in range(place + 1):
                link.popleft()
            return step
    return None


def token_times(timeline: Timeline) -> list[TokenTime]:
    """Every emission of every request, in order."""
    cause_of, stages = causes(timeline.log), timeline.stages
    previous = {request.request: request.submitted for request in timeline.requests}
    times: list[TokenTime] = []
    for node in timeline.log.nodes:
        emitted: Counter[int] = Counter()
        for step in node.steps:
            for effect in step.effects:
                if isinstance(effect, Emit) and effect.tokens:
                    request, index = effect.request, emitted[effect.request]
                    emitted[request] += len(effect.tokens)
                    since = previous.get(request, step.at)
                    spans = tuple(_back(step, since, cause_of, stages))
                    until = previous[request] = spans[0].until if spans else step.at
                    times.append(TokenTime(request, index, since, until, spans))
    return times


def _back(
    step: LogStep, since: float, cause_of: dict[LogStep, Cause], stages: int
) -> Iterator[PathSpan]:
    """The spans from ``since`` to the end of a step, latest first, without gaps."""
    end = step.until
    for span in _chain(step, cause_of, stages):
        # Clocks are estimates: a message may seem to come before it was sent.
        at = max(since, min(span.at, end))
        if end > at:
            yield replace(span, at=at, until=end)
        end = at
        if end <= since:
            return
    if end > since:
        yield PathSpan("other", "other", since, end)


def _chain(step: LogStep, cause_of: dict[LogStep, Cause], stages: int) -> Iterator[PathSpan]:
    """Backwards; each span begins where the next one ends. Ends at a cycle: where a recording
    begins amid a run, equal messages may be taken for each other."""
    visited: set[LogStep] = set()
    while True:
        visited.add(step)
        here = device_name(step.rank, stages)
        yield PathSpan("step", here, step.at, step.until)
        if step not in cause_of or cause_of[step][0] in visited:
            return
        sender, run = cause_of[step]
        if run is not None:
            yield PathSpan("step", here, run.until, step.at)
            yield PathSpan(_KINDS.get(run.kind, "cache"), here, run.at, run.until)
            yield PathSpan("device", here, sender.until, run.at)
        elif isinstance(step.input, ReceivedMessage):
            yield PathSpan("link", link_name(sender.rank, step.rank, stages), sender.until, step.at)
        step = sender


def latency_breakdowns(times: Sequence[TokenTime], *, decoding: bool) -> list[LatencyBreakdown]:
    """Sums over each request; ``decoding``: without its first token."""
    requests: dict[int, list[TokenTime]] = {}
    for time in times:
        if time.index or not decoding:
            requests.setdefault(time.request, []).append(time)
    breakdowns = []
    for request, tokens in sorted(requests.items()):
        resources: defaultdict[str, float] = defaultdict(float)
        kinds: defaultdict[str, float] = defaultdict(float)
        for span in (span for token in tokens for span in token.spans):
            resources[span.resource] += span.seconds
            kinds[f"{span.resource} {span.kind}"] += span.seconds
        since = min(token.at for token in tokens)
        seconds = max(token.until for token in tokens) - since
        breakdowns.append(LatencyBreakdown(request, since, seconds, dict(resources), dict(kinds)))
    return breakdowns
