"""Why a step happened: the step that sent what it received, or that issued the job that ended.

Messages are matched by sender, receiver and checksum in the order of the link, so messages lost
with a link leave no wrong pairs. Pure.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.trace import records
from asyncspec.trace.analysis.answers import Answers
from asyncspec.trace.analysis.log import Log, LogRun, LogStep, NodeLog
from asyncspec.trace.serialize import checksum
from asyncspec_protocol.ids import Rank, draft_number, is_draft

# Messages of a link that may be missing between two that are there.
_LOOK_AHEAD = 1024


class Cause(Struct, frozen=True):
    """The step before, and the job between them where there is one."""

    step: LogStep
    run: LogRun | None = None


Key = tuple[int, int]
"""A step: its life and its index."""


def causes(log: Log) -> Mapping[Key, Cause]:
    """The cause of every step that has one in the trace."""
    found: dict[Key, Cause] = {}
    sent = _sent(log)
    for life in log.lives:
        for step in life.steps:
            cause = _cause(life, step, sent)
            if cause is not None:
                found[step.life, step.index] = cause
    return found


Letters = dict[tuple[int, int], deque[tuple[int, LogStep]]]
"""By sender and receiver: checksum and sending step of every message, in order."""


def _sent(log: Log) -> Letters:
    letters: Letters = {}
    for life in log.lives:
        for step in life.steps:
            for effect in step.effects:
                if isinstance(effect, records.Sent) and effect.nbytes:
                    link = letters.setdefault((life.rank, effect.to), deque())
                    link.append((effect.check, step))
    return letters


def _cause(life: NodeLog, step: LogStep, sent: Letters) -> Cause | None:
    match step.input:
        case records.ReceivedMessage(peer, message):
            sender = _take(sent.get((peer, life.rank)), checksum(message))
            return None if sender is None else Cause(sender)
        case records.JobResult(job):
            index = life.issued.get(job)
            return None if index is None else Cause(life.steps[index], life.runs.get(job))
        case _:
            return None


def _take(link: deque[tuple[int, LogStep]] | None, check: int) -> LogStep | None:
    """The next message of a link with this checksum; those before it were lost."""
    for place, (found, step) in enumerate(link or ()):
        if place > _LOOK_AHEAD:
            return None
        if found == check:
            assert link is not None
            for _ in range(place + 1):
                link.popleft()
            return step
    return None


# --- Where each token's time went: the chain of causes from its emission back to the one before.
# Every step of a machine has a cause: a message, so the sender's step, or a job, so the step that
# issued it. Following causes back gives one unbroken chain through all nodes, and each of its
# pieces is the work of one resource. What holds a token up shows without any rule for it: a
# segment that waits for a busy stage has that stage's work in its chain. The pieces of a token
# sum to its time by construction; what has no known cause is "other". Pure.

_KINDS = {"forward": "compute", "batch": "compute", "expand": "draft", "drafting": "draft"}


class PathSpan(Struct, frozen=True):
    """Part of a token's time. ``kind``: "compute", "draft", "cache" (jobs on a node's device),
    "device" (a job waits for the device or its thread), "link" (from one node to another), "step"
    (a node's machine and event loop), "other"."""

    kind: str
    # Who is to be made faster: "V2", "D0", "source", "V1 -> V2" or "other".
    resource: str
    at: float
    until: float
    # Of a compute piece: whose pass it was.
    session: int = -1
    segment: int = -1

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.until - self.at


def name(rank: int, stages: int) -> str:
    """D0, V1, V2, ..., further draft nodes D1, D2, ..., and a token source with a node of its
    own."""
    if is_draft(rank):
        return f"D{draft_number(Rank(rank))}"
    return f"V{rank}" if rank <= stages else "source"


def link(source: int, target: int, stages: int) -> str:
    """One direction of a link."""
    return f"{name(source, stages)} -> {name(target, stages)}"


class Chains:
    """Walks back from any step of a trace."""

    def __init__(self, log: Log) -> None:
        self._stages = log.stages
        self._lives: Sequence[NodeLog] = log.lives
        self._causes: Mapping[Key, Cause] = causes(log)

    def back(self, step: Key, since: float) -> tuple[PathSpan, ...]:
        """The pieces from ``since`` to the end of a step, latest first, without gaps."""
        life, index = step
        start = self._lives[life].steps[index]
        pieces: list[PathSpan] = []
        end = start.until
        for piece in self._pieces(start):
            # Clocks are estimates: a message may seem to come before it was sent.
            at, until = max(since, min(piece.at, end)), end
            if until > at:
                pieces.append(replace(piece, at=at, until=until))
            end = at
            if end <= since:
                break
        if end > since:
            pieces.append(PathSpan("other", "other", since, end))
        return tuple(pieces)

    def _pieces(self, step: LogStep) -> Iterator[PathSpan]:
        """Backwards; each one begins where the next one ends. No step is its own cause, though a
        recording from amid a run may look so: messages that are alike are taken for each other."""
        met: set[Key] = set()
        while True:
            met.add((step.life, step.index))
            here = name(step.rank, self._stages)
            yield PathSpan("step", here, step.at, step.until)
            cause = self._causes.get((step.life, step.index))
            if cause is None or (cause.step.life, cause.step.index) in met:
                return
            before, run = cause.step, cause.run
            if run is not None:
                yield PathSpan("step", here, run.until, step.at)
                kind = _KINDS.get(run.kind, "cache")
                yield PathSpan(kind, here, run.at, run.until, run.session, run.segment)
                yield PathSpan("device", here, before.until, run.at)
            elif isinstance(step.input, records.ReceivedMessage):
                line = link(before.rank, step.rank, self._stages)
                yield PathSpan("link", line, before.until, step.at)
            step = before


# --- Per request: where the time of each of its tokens went. Pure.


class TokenTime(Struct, frozen=True):
    """One emission: ``count`` tokens at once, and the pieces since the one before (or since the
    request was submitted), latest first."""

    request: int
    index: int
    count: int
    at: float
    until: float
    pieces: tuple[PathSpan, ...]


class LatencyBreakdown(Struct, frozen=True):
    """A request. Seconds by resource and by (resource, kind); they sum to ``seconds``, the time
    from ``since`` to the last token."""

    request: int
    since: float
    seconds: float
    resources: dict[str, float]
    kinds: dict[str, float]


def token_times(chains: Chains, answers: Answers) -> list[TokenTime]:
    """Every emission of every request, in order."""
    found: list[TokenTime] = []
    before = {number: request.submitted for number, request in answers.requests.items()}
    for i, token in enumerate(answers.tokens):
        if token.depth:
            continue
        count = 1
        while i + count < len(answers.tokens) and answers.tokens[i + count].depth:
            count += 1
        since = before.get(token.request, token.at)
        pieces = chains.back(answers.steps[i], since)
        until = pieces[0].until if pieces else token.at
        before[token.request] = until
        found.append(TokenTime(token.request, token.index, count, since, until, pieces))
    return found


def latency_breakdowns(times: Sequence[TokenTime], *, decoding: bool) -> list[LatencyBreakdown]:
    """Sums over each request; ``decoding``: without its first token."""
    found = []
    for request in sorted({time.request for time in times}):
        mine = [t for t in times if t.request == request and (t.index or not decoding)]
        if mine:
            found.append(_breakdown(request, mine))
    return found


def _breakdown(request: int, times: Sequence[TokenTime]) -> LatencyBreakdown:
    resources: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for time in times:
        for piece in time.pieces:
            resources[piece.resource] += piece.seconds  # type: ignore[assignment]
            kinds[f"{piece.resource} {piece.kind}"] += piece.seconds  # type: ignore[assignment]
    since = min(time.at for time in times)
    seconds = max(time.until for time in times) - since
    return LatencyBreakdown(request, since, seconds, dict(resources), dict(kinds))
