"""A node's recorder: inputs, effects and jobs as trace lines, the latest of them in memory.

It never blocks and is bounded, in lines and in bytes: the oldest lines make room for the newest,
and are counted.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import assert_never

from msgspec.structs import replace

from asyncspec.core import machine
from asyncspec.core.jobs import Batch, DraftBatch, Feed, Forward, Import, Job, SamplerOutput
from asyncspec.core.machine import TraceHook
from asyncspec.trace import records
from asyncspec.trace.records import checksum, packed_bytes
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import Expand, Expanded, Message, PruneIndices, Segment, Verdict

MOST = 200_000
"""Lines kept by default."""

LINE_BYTES = 512
"""Mean length of lines, as ``packed_bytes``, up to which all of them are kept. Most have 150 to
350. In memory they take five times as much, and lists of numbers twelve times."""


class Recorder(TraceHook):
    """Keeps the latest lines of one node, numbered from 0."""

    def __init__(
        self,
        node: records.NodeRecord,
        *,
        max_lines: int = MOST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.node = node
        self._clock = clock
        # Structs that the garbage collector does not track, as there are so many.
        self._lines: deque[records.Record] = deque()
        self._sizes: deque[int] = deque()
        self._most = max_lines
        # Bytes that may still be added before the oldest lines go.
        self._room = max_lines * LINE_BYTES
        # Number of the line that comes next.
        self.end = 0
        # Jobs issued so far; at the first line, those whose results are still to come.
        self.issued = 0
        self._steps = self._ran = 0

    def stepped(
        self,
        event: machine.Input,
        effects: tuple[machine.Effect, ...],
        sizes: Sequence[int],
        at: float,
        until: float,
        error: str = "",
    ) -> None:
        short = []
        for effect, size in zip(effects, sizes, strict=True):
            short.append(effect_record(effect, self.issued, size))
            self.issued += isinstance(effect, machine.Compute)
        source = input_record(event, self._ran - 1)
        self._add(records.Step(self.node.rank, self._steps, at, until, source, tuple(short), error))
        self._steps += 1

    def ran(self, job: Job, at: float, until: float) -> None:
        kind, session, segment, rows = job_summary(job)
        rank = self.node.rank
        self._add(records.Ran(rank, self._ran, kind, at, until, session, segment, rows))
        self._ran += 1

    def blocked(self, peer: Rank, at: float, until: float, nbytes: int) -> None:
        self._add(records.Blocked(self.node.rank, peer, at, until, nbytes))

    def probed(self, peer: Rank, asked: float, answered: float, came: float) -> None:
        self._add(records.Probe(self.node.rank, peer, asked, answered, came))

    def silent(self, peer: Rank, at: float, until: float) -> None:
        self._add(records.Silence(self.node.rank, peer, at, until))

    def text(self, request: int, tokens: tuple[int, ...], text: str) -> None:
        self._add(records.Text(self.node.rank, request, tokens, text))

    def _add(self, line: records.Record) -> None:
        """Keep a line; the oldest go where there are too many, or a peer's are too long."""
        size = packed_bytes(line)
        self._lines.append(line)
        self._sizes.append(size)
        self._room -= size
        self.end += 1
        while len(self._lines) > self._most or (self._room < 0 and len(self._lines) > 1):
            self._lines.popleft()
            self._room += self._sizes.popleft()

    def ended(self) -> records.End:
        return records.End(self.node.rank, self._clock())

    def since(self, seconds: float) -> int:
        """Number of the first line of the last ``seconds``; below 0: of the oldest line kept."""
        if seconds < 0:
            return self.end - len(self._lines)
        start, number = self._clock() - seconds, self.end
        for line in reversed(self._lines):
            if _end(line) < start:
                break
            number -= 1
        return number

    def read(
        self, number: int, max_lines: int, max_bytes: float = math.inf
    ) -> tuple[list[records.Record], int]:
        """Up to ``max_lines`` lines from ``number`` on, and the number of the line after them: one,
        or as many as ``max_bytes`` allow. Lines that are gone are a ``Dropped`` in their place."""
        oldest = self.end - len(self._lines)
        lost = [records.Dropped(self.node.rank, oldest - number)] if number < oldest else []
        start = max(0, number - oldest)
        count = 0
        for size in islice(self._sizes, start, start + max_lines):
            max_bytes -= size
            if count and max_bytes < 0:
                break
            count += 1
        lines = list(islice(self._lines, start, start + count))
        return [*lost, *lines], oldest + start + len(lines)


def _end(line: records.Record) -> float:
    """When it was over; lines without a time go with those around them."""
    match line:
        case records.Probe(came=came):
            return came
        case records.Text() | records.Dropped():
            return math.inf
        case records.NodeRecord(at=at) | records.End(at=at):
            return at
        case _:
            return line.until


def input_record(event: machine.Input, job: int) -> records.Input:
    """The whole input except handles. ``job``: number of the job that ended last."""
    match event:  # the most frequent first: this runs for every step of a recorded node
        case machine.Received(peer, message, tensor, seconds):
            return records.ReceivedMessage(peer, message, tensor is not None, seconds)
        case machine.Computed(work, result, seconds, waited):
            if isinstance(work, Batch | DraftBatch) and isinstance(result, tuple):
                parts = tuple(_result(part, job, 0.0) for part in result)
                record = records.JobResult(job, seconds, parts=parts)
            else:
                record = _result(result, job, seconds)
            return replace(record, waited=waited) if waited else record
        case machine.TaskDone(task):
            return records.TaskResult(task)
        case machine.PrefixRead():
            return replace(event, parts=None)
        case _:
            return event


def _result(result: object, job: int, seconds: float) -> records.JobResult:
    if isinstance(result, Expanded):
        return records.JobResult(job, seconds, expanded=result)
    if isinstance(result, SamplerOutput):
        return records.JobResult(
            job,
            seconds,
            tokens=result.tokens,
            has_features=result.features is not None,
            top_tokens=result.top_tokens,
            token_log_probs=result.token_log_probs,
            prompt_logprobs=result.prompt_logprobs,
        )
    # Sampled tokens; the handles of toy stages are tuples too.
    plain = isinstance(result, tuple) and all(type(token) is int for token in result)
    return records.JobResult(job, seconds, tokens=result if plain else None)  # type: ignore[arg-type]


def effect_record(effect: machine.Effect, number: int, nbytes: int) -> records.Effect:
    """A summary of an effect. ``number``: of the job it issues; ``nbytes``: bytes it sent."""
    match effect:
        case machine.Send(to, message):
            tag = message.__struct_config__.tag
            assert isinstance(tag, str)
            session, segment = _ids(message)
            count = _node_count(message)
            return records.Sent(to, tag, session, segment, count, nbytes, checksum(message))
        case machine.Compute(job):
            check = checksum(_without_handles(job))
            return records.Issued(number, *job_summary(job), check, _parts(job))
        case machine.Abandon(job):
            return records.AbandonedJob(*job_summary(job)[:3])
        case machine.RunNext(_, job):
            return records.NextJob() if job is None else records.NextJob(*job_summary(job))
        case machine.Emit():
            if effect.outputs or effect.prompt_logprobs or effect.features is not None:
                return replace(effect, outputs=(), prompt_logprobs=(), features=None)
            return effect
        case machine.SendClosed(to, session, passes, rows, dead_rows):
            return records.Reported(to, session, passes, rows, dead_rows, nbytes)
        case machine.Finish() | machine.SetTimer():
            return effect
        case machine.RunTask(task, argument):
            return records.TaskRun(task, checksum(argument))
        case machine.ReadPrefix():
            return replace(effect, keys=())
        case machine.WritePrefix():
            return replace(effect, keys=(), arrays=None)
        case _:
            assert_never(effect)


def _node_count(message: Message) -> int:
    match message:
        case Segment(ids=nodes) | Verdict(ids=nodes) | PruneIndices(keep=nodes):
            return len(nodes)
        case Expanded(tokens=tokens):
            return len(tokens)
        case _:
            return 0


def _ids(job: Job | Message) -> tuple[int, int]:
    """Session and segment of a job or message; -1 where it has none, or more than one."""
    return getattr(job, "session", -1), getattr(job, "segment", -1)


def job_summary(job: Job) -> tuple[str, int, int, int]:
    """The name of a job's type, its session and segment, and its rows: of a draft job the nodes
    requested, of a ``Feed`` the positions whose features it brings."""
    kind, rows = type(job).__name__.lower(), 0
    match job:
        case Forward() | Batch():
            rows = job.row_count
        case Expand(count=count):
            rows = count
        case DraftBatch(jobs):
            kind, rows = "drafting", sum([tree.count for tree in jobs])
        case Feed(rows=fed):
            rows = sum([len(some.rows) for some in fed])
        case _:
            pass
    return kind, *_ids(job), rows


def _parts(job: Job) -> tuple[tuple[int, int, int], ...]:
    """Session, segment and rows of the passes or trees of a batch; empty for any other job."""
    if not isinstance(job, Batch | DraftBatch):
        return ()
    parts = job.passes if isinstance(job, Batch) else job.jobs
    return tuple([job_summary(part)[1:] for part in parts])


def _without_handles(job: Job) -> object:
    match job:
        case Batch(passes):
            return tuple(map(_without_handles, passes))
        case Import(session, slots):
            return (session, slots)
        case Feed(session, start, rows):
            return (session, start, tuple(some.rows for some in rows))
        case Forward(session, segment, committed, rows, tokens, hidden):
            indices = None if hidden is None else hidden.rows
            work = (session, segment, committed, rows, tokens, indices, job.sampled_rows)
            return (*work, job.scored_tokens) if job.scored_tokens else work
        case _:
            return job
