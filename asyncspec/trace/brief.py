"""Inputs and effects of a machine as lines of a trace: without handles, with checksums."""

from __future__ import annotations

import zlib
from typing import assert_never

import msgspec

from asyncspec.actor import machine
from asyncspec.jobs import Batch, Drafting, Feed, Forward, Job, Judged
from asyncspec.trace import records
from asyncspec_protocol.messages import Expand, Expanded, Message, PruneIndices, Segment, Verdict

_PACK = msgspec.msgpack.Encoder().encode


def input_record(event: machine.Input, job: int) -> records.Input:
    """An input in full, handles left out. ``job``: number of the job that has just ended."""
    # Asked in the order of how often they come: this runs for every step of a node that records.
    if isinstance(event, machine.Received):
        tensor = event.tensor is not None
        return records.Received(event.peer, event.message, tensor, event.seconds)
    if isinstance(event, machine.Computed):
        return _computed(event, job)
    match event:
        case machine.Fired(timer):
            return records.Fired(timer)
        case machine.Joined(peer):
            return records.Joined(peer)
        case machine.Lost(peer, reason):
            return records.Lost(peer, reason)
        case machine.Submitted(request):
            return records.Submitted(request)
        case machine.Cancelled(request):
            return records.Cancelled(request)
        case machine.Stopped(request, kept):
            return records.Stopped(request, kept)
        case machine.Planned():
            return records.Planned()
        case _:
            assert_never(event)


def _computed(event: machine.Computed, job: int) -> records.Computed:
    if isinstance(event.job, Batch | Drafting) and isinstance(event.result, tuple):
        parts = tuple(_result(own, job, 0.0) for own in event.result)
        return records.Computed(job, event.seconds, parts=parts)
    return _result(event.result, job, event.seconds)


def _result(result: object, job: int, seconds: float) -> records.Computed:
    if isinstance(result, Expanded):
        return records.Computed(job, seconds, expanded=result)
    if isinstance(result, Judged):
        featured = result.features is not None
        return records.Computed(
            job, seconds, result.tokens, None, featured, result.likely, result.drawn
        )
    # Drawn tokens; toy stages have tuples as handles too.
    plain = isinstance(result, tuple) and all(type(token) is int for token in result)
    return records.Computed(job, seconds, tokens=result if plain else None)  # type: ignore[arg-type]


def effect_record(effect: machine.Effect, number: int, nbytes: int) -> records.Effect:
    """An effect in short. ``number``: a job's number; ``nbytes``: written for it."""
    if isinstance(effect, machine.Send):
        return _sent(effect.to, effect.message, nbytes)
    if isinstance(effect, machine.Compute):
        return _issued(effect.job, number)
    match effect:
        case machine.Abandon(job):
            return records.Abandoned(kind_of_job(job), *names(job))
        case machine.Next(_, job):
            if job is None:
                return records.Next()
            return records.Next(kind_of_job(job), *names(job), rows(job))
        case machine.Emit(request, tokens, hits, session):
            return records.Emitted(request, tokens, hits, session)
        case machine.Finish(request, reason, stats, _, session):
            return records.Finished(request, reason, session, dict(stats))
        case machine.Report(to, session, passes, computed, dead_rows):
            return records.Reported(to, session, passes, computed, dead_rows, nbytes)
        case machine.Arm(timer, at):
            return records.Armed(timer, at)
        case machine.Plan(planning):
            return records.Plan(len(planning.sessions), zlib.crc32(_PACK(planning)))
        case _:
            assert_never(effect)


def _sent(to: int, message: Message, nbytes: int) -> records.Sent:
    return records.Sent(
        to,
        kind(message),
        getattr(message, "session", -1),
        getattr(message, "segment", -1),
        nodes(message),
        nbytes,
        zlib.crc32(_PACK(message)),
    )


def _issued(work: Job, job: int) -> records.Issued:
    return records.Issued(
        job,
        kind_of_job(work),
        *names(work),
        rows(work),
        zlib.crc32(_PACK(_without_handles(work))),
        tuple([(*names(one), rows(one)) for one in parts(work)]),
    )


def kind(message: Message) -> str:
    """The tag of a message."""
    tag = message.__struct_config__.tag
    assert isinstance(tag, str)
    return tag


def nodes(message: Message) -> int:
    """How many nodes a message speaks of."""
    if isinstance(message, Segment | Verdict):
        return len(message.ids)
    if isinstance(message, PruneIndices):
        return len(message.keep)
    return len(message.tokens) if isinstance(message, Expanded) else 0


def kind_of_job(job: Job) -> str:
    """admit, forward, batch, compact, release, expand, drafting or feed."""
    return type(job).__name__.lower()


def names(job: Job) -> tuple[int, int]:
    """A job's session and segment; -1 where it has none, or more than one."""
    return getattr(job, "session", -1), getattr(job, "segment", -1)


def rows(job: Job) -> int:
    """Rows of a pass; nodes that a draft is asked for; positions whose features it is given."""
    match job:
        case Forward() | Batch():
            return job.row_count
        case Expand(count=count):
            return count
        case Drafting(jobs):
            return sum([tree.count for tree in jobs])
        case Feed(rows=fed):
            return sum(len(some.rows) for some in fed)
        case _:
            return 0


def parts(job: Job) -> tuple[Forward | Expand, ...]:
    """The passes of a batch, or its trees; none of any other job."""
    if isinstance(job, Batch):
        return job.passes
    return job.jobs if isinstance(job, Drafting) else ()


def _without_handles(job: Job) -> object:
    if isinstance(job, Batch):
        return tuple(map(_without_handles, job.passes))
    if isinstance(job, Feed):
        return (job.session, job.start, tuple(some.rows for some in job.rows))
    if not isinstance(job, Forward):
        return job
    hidden = None if job.hidden is None else job.hidden.rows
    return (job.session, job.segment, job.committed, job.rows, job.tokens, hidden, job.judge)
