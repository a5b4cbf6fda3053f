"""Inputs, effects and jobs as trace records: without tensor handles, with checksums."""

from __future__ import annotations

import zlib
from typing import assert_never

import msgspec

from asyncspec.core import machine
from asyncspec.core.jobs import Batch, DraftBatch, Feed, Forward, Job, SamplerOutput
from asyncspec.trace import records
from asyncspec_protocol.messages import Expand, Expanded, Message, PruneIndices, Segment, Verdict

_PACK = msgspec.msgpack.Encoder().encode


def checksum(value: object) -> int:
    """CRC-32 of the MessagePack form of a message or struct."""
    return zlib.crc32(_PACK(value))


def input_record(event: machine.Input, job: int) -> records.Input:
    """The whole input except handles. ``job``: number of the job that ended last."""
    match event:  # the most frequent first: this runs for every step of a recorded node
        case machine.Received(peer, message, tensor, seconds):
            return records.ReceivedMessage(peer, message, tensor is not None, seconds)
        case machine.Computed(work, result, seconds):
            if isinstance(work, Batch | DraftBatch) and isinstance(result, tuple):
                parts = tuple(_result(part, job, 0.0) for part in result)
                return records.JobResult(job, seconds, parts=parts)
            return _result(result, job, seconds)
        case machine.TaskDone(task):
            return records.TaskResult(task)
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
            return records.Abandoned(*job_summary(job)[:3])
        case machine.RunNext(_, job):
            return records.NextJob() if job is None else records.NextJob(*job_summary(job))
        case machine.Emit():
            return msgspec.structs.replace(effect, outputs=()) if effect.outputs else effect
        case machine.SendClosed(to, session, passes, rows, dead_rows):
            return records.Reported(to, session, passes, rows, dead_rows, nbytes)
        case machine.Finish() | machine.SetTimer():
            return effect
        case machine.RunTask(task, argument):
            return records.TaskRun(task, checksum(argument))
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
        case Feed(session, start, rows):
            return (session, start, tuple(some.rows for some in rows))
        case Forward(session, segment, committed, rows, tokens, hidden):
            given = None if hidden is None else hidden.rows
            return (session, segment, committed, rows, tokens, given, job.sampled_rows)
        case _:
            return job
