"""The lines of a trace file: what one node saw and did (docs/trace.md).

Law of this file: fields are only ever appended, with a default. A line holds every input of a
machine in full, so that a recording can be replayed, and of its effects what a reader needs and a
checksum. Tensors and handles never get here.
"""

from __future__ import annotations

import zlib
from typing import assert_never

import msgspec
from msgspec import Struct

from asyncspec.core import machine
from asyncspec.core.jobs import Batch, DraftBatch, Feed, Forward, Job, SamplerOutput
from asyncspec.core.machine import Request
from asyncspec_protocol.messages import Expand, Expanded, Message, PruneIndices, Segment, Verdict

FORMAT = 1


class Header(Struct, frozen=True, tag="trace", tag_field="event"):
    """The first line of a file."""

    format: int
    program: str
    # ISO 8601, UTC.
    created: str
    # What was run, for people.
    title: str = ""


class Node(Struct, frozen=True, tag="node", tag_field="event", omit_defaults=True):
    """Who a rank is; the first line of each node. ``at`` and ``wall`` are the same moment on its
    own clock and in Unix time."""

    rank: int
    at: float
    wall: float
    role: str
    stages: int
    layers: tuple[int, int] = (0, 0)
    dtype: str = ""
    mode: str = ""
    host: str = ""
    pid: int = 0
    # The machine's settings, for a replay.
    config: dict[str, int | float | str | bool | tuple[int, ...] | None] = {}
    # Recorded from the machine's first step on.
    whole: bool = False


# --- inputs of a machine ------------------------------------------------------------------------


class Received(Struct, frozen=True, array_like=True, tag="received", gc=False):
    """A message came; ``tensor``: with one."""

    peer: int
    message: Message
    tensor: bool = False
    # What its link takes for the tensor.
    seconds: float = 0.0


class Computed(Struct, frozen=True, array_like=True, tag="computed", gc=False):
    """The ``job``-th job of this node (from 0) is done. Neither result: a handle; ``featured``:
    a handle beside the tokens."""

    job: int
    seconds: float
    tokens: tuple[int, ...] | None = None
    expanded: Expanded | None = None
    featured: bool = False
    # Likeliest tokens of each verified row with their log-probabilities, where they were wanted.
    likely: tuple[tuple[tuple[int, ...], tuple[float, ...]], ...] = ()
    # The log-probabilities of the tokens, where they were wanted.
    drawn: tuple[float, ...] = ()
    # What each pass of a batch gave, or each tree.
    parts: tuple[Computed, ...] = ()


class Fired(Struct, frozen=True, array_like=True, tag="fired", gc=False):
    """A deadline has come."""

    timer: str


class Joined(Struct, frozen=True, array_like=True, tag="joined", gc=False):
    """A link is up."""

    peer: int


class Lost(Struct, frozen=True, array_like=True, tag="lost", gc=False):
    """A link is down."""

    peer: int
    reason: str = ""


class Submitted(Struct, frozen=True, array_like=True, tag="submitted"):
    """A user's request."""

    request: Request


class Cancelled(Struct, frozen=True, array_like=True, tag="cancelled", gc=False):
    """A user no longer wants it."""

    request: int


class Stopped(Struct, frozen=True, array_like=True, tag="stopped", gc=False):
    """A stop string was found: the answer ends with its ``kept``-th token."""

    request: int
    kept: int


class TaskDone(Struct, frozen=True, array_like=True, tag="task_done", gc=False):
    """The task that the node asked for last by this name is done: its result is a function of its
    argument."""

    task: str


Input = Received | Computed | Fired | Joined | Lost | Submitted | Cancelled | Stopped | TaskDone


# --- effects of a machine -----------------------------------------------------------------------


class Sent(Struct, frozen=True, array_like=True, tag="send", gc=False):
    """A message was given to a link. ``nbytes`` is 0 where the link was down.

    ``session`` and ``segment`` are -1 where the message has none; ``count`` is its number of
    nodes; ``check`` the CRC-32 of its encoded form.
    """

    to: int
    kind: str
    session: int
    segment: int
    count: int
    nbytes: int
    check: int


class Issued(Struct, frozen=True, array_like=True, tag="compute", gc=False):
    """The ``job``-th job of this node was queued at its device. ``check``: CRC-32 of all of it
    but handles."""

    job: int
    kind: str
    session: int
    segment: int
    rows: int
    check: int
    # Session, segment and rows of each pass of a batch, or of each tree: a batch has no session of
    # its own.
    parts: tuple[tuple[int, int, int], ...] = ()


class Emitted(Struct, frozen=True, array_like=True, tag="emit", gc=False):
    """Certain tokens for the user; the first ``hits`` of them were nodes of the tree."""

    request: int
    tokens: tuple[int, ...]
    hits: int = 0
    session: int = -1


class Finished(Struct, frozen=True, array_like=True, tag="finish"):
    """The end of a request."""

    request: int
    reason: str
    session: int
    stats: dict[str, float] = {}


class Reported(Struct, frozen=True, array_like=True, tag="report", gc=False):
    """A stage's account of a session."""

    to: int
    session: int
    passes: int
    rows: int
    dead_rows: int
    nbytes: int


class Abandoned(Struct, frozen=True, array_like=True, tag="abandon", gc=False):
    """A job's result is of no use any more: the device was told to end it."""

    kind: str
    session: int
    segment: int = -1


class Next(Struct, frozen=True, array_like=True, tag="next", gc=False):
    """The device was told what it goes on with by itself; empty: with nothing."""

    kind: str = ""
    session: int = -1
    segment: int = -1
    rows: int = 0


class Armed(Struct, frozen=True, array_like=True, tag="arm", gc=False):
    """A deadline was set, or taken back (None)."""

    timer: str
    at: float | None = None


class TaskRun(Struct, frozen=True, array_like=True, tag="run_task", gc=False):
    """A named task was asked for. ``check``: CRC-32 of its argument."""

    task: str
    check: int


Effect = Sent | Issued | Abandoned | Next | Emitted | Finished | Reported | Armed | TaskRun


# --- what happened ------------------------------------------------------------------------------


class Step(Struct, frozen=True, tag="step", tag_field="event", omit_defaults=True, gc=False):
    """One input of the machine, from ``at`` until its effects were under way.

    ``number`` counts the steps of the node from 0; a gap means lost lines.
    """

    rank: int
    number: int
    at: float
    until: float
    input: Input
    effects: tuple[Effect, ...] = ()
    # Why the input was refused.
    error: str = ""


class Ran(Struct, frozen=True, tag="ran", tag_field="event", omit_defaults=True, gc=False):
    """The device worked on the ``job``-th job. ``rows``: of a pass; of a draft, nodes asked for."""

    rank: int
    job: int
    kind: str
    at: float
    until: float
    session: int = -1
    segment: int = -1
    rows: int = 0


class Blocked(Struct, frozen=True, tag="blocked", tag_field="event", gc=False):
    """``nbytes`` for a peer waited for the network."""

    rank: int
    peer: int
    at: float
    until: float
    nbytes: int


class Probe(Struct, frozen=True, tag="probe", tag_field="event", gc=False):
    """The peer's clock showed ``answered`` at some moment between ``asked`` and ``came`` here."""

    rank: int
    peer: int
    asked: float
    answered: float
    came: float


class Silence(Struct, frozen=True, tag="silence", tag_field="event", gc=False):
    """Nothing was heard of a peer, heartbeats included."""

    rank: int
    peer: int
    at: float
    until: float


class Said(Struct, frozen=True, tag="text", tag_field="event", gc=False):
    """The text of tokens that were emitted; only where the user wants text in traces."""

    rank: int
    request: int
    tokens: tuple[int, ...]
    text: str


class Dropped(Struct, frozen=True, tag="dropped", tag_field="event", gc=False):
    """So many lines of a node were lost here: its buffer was full, or the reader too slow."""

    rank: int
    count: int


class End(Struct, frozen=True, tag="end", tag_field="event", gc=False):
    """A node's last line: it was told to stop recording. Missing where a run was killed."""

    rank: int
    at: float


Record = Step | Ran | Blocked | Probe | Silence | Said | Dropped | Node | End
Line = Header | Record


class Trace(Struct, frozen=True):
    """A file's content. The lines of one node stand in the order in which things happened there."""

    header: Header
    lines: tuple[Record, ...]


ENCODER = msgspec.json.Encoder()
DECODER: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


# --- Inputs and effects of a machine as lines of a trace: without handles, with checksums.

_PACK = msgspec.msgpack.Encoder().encode


def input_record(event: machine.Input, job: int) -> Input:
    """An input in full, handles left out. ``job``: number of the job that has just ended."""
    # Asked in the order of how often they come: this runs for every step of a node that records.
    if isinstance(event, machine.Received):
        tensor = event.tensor is not None
        return Received(event.peer, event.message, tensor, event.seconds)
    if isinstance(event, machine.Computed):
        return _computed(event, job)
    match event:
        case machine.TimerFired(timer):
            return Fired(timer)
        case machine.LinkUp(peer):
            return Joined(peer)
        case machine.LinkDown(peer, reason):
            return Lost(peer, reason)
        case machine.Submitted(request):
            return Submitted(request)
        case machine.Cancelled(request):
            return Cancelled(request)
        case machine.Stopped(request, kept):
            return Stopped(request, kept)
        case machine.TaskDone(task):
            return TaskDone(task)
        case _:
            assert_never(event)


def _computed(event: machine.Computed, job: int) -> Computed:
    if isinstance(event.job, Batch | DraftBatch) and isinstance(event.result, tuple):
        parts = tuple(_result(own, job, 0.0) for own in event.result)
        return Computed(job, event.seconds, parts=parts)
    return _result(event.result, job, event.seconds)


def _result(result: object, job: int, seconds: float) -> Computed:
    if isinstance(result, Expanded):
        return Computed(job, seconds, expanded=result)
    if isinstance(result, SamplerOutput):
        featured = result.features is not None
        return Computed(
            job, seconds, result.tokens, None, featured, result.top_tokens, result.token_log_probs
        )
    # Drawn tokens; toy stages have tuples as handles too.
    plain = isinstance(result, tuple) and all(type(token) is int for token in result)
    return Computed(job, seconds, tokens=result if plain else None)  # type: ignore[arg-type]


def effect_record(effect: machine.Effect, number: int, nbytes: int) -> Effect:
    """An effect in short. ``number``: a job's number; ``nbytes``: written for it."""
    if isinstance(effect, machine.Send):
        return _sent(effect.to, effect.message, nbytes)
    if isinstance(effect, machine.Compute):
        return _issued(effect.job, number)
    match effect:
        case machine.Abandon(job):
            return Abandoned(kind_of_job(job), *names(job))
        case machine.RunNext(_, job):
            if job is None:
                return Next()
            return Next(kind_of_job(job), *names(job), rows(job))
        case machine.Emit(request, tokens, hits, session):
            return Emitted(request, tokens, hits, session)
        case machine.Finish(request, reason, stats, _, session):
            return Finished(request, reason, session, dict(stats))
        case machine.SendClosed(to, session, passes, computed, dead_rows):
            return Reported(to, session, passes, computed, dead_rows, nbytes)
        case machine.SetTimer(timer, at):
            return Armed(timer, at)
        case machine.RunTask(task, argument):
            return TaskRun(task, zlib.crc32(_PACK(argument)))
        case _:
            assert_never(effect)


def _sent(to: int, message: Message, nbytes: int) -> Sent:
    return Sent(
        to,
        kind(message),
        getattr(message, "session", -1),
        getattr(message, "segment", -1),
        nodes(message),
        nbytes,
        zlib.crc32(_PACK(message)),
    )


def _issued(work: Job, job: int) -> Issued:
    return Issued(
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
        case DraftBatch(jobs):
            return sum([tree.count for tree in jobs])
        case Feed(rows=fed):
            return sum(len(some.rows) for some in fed)
        case _:
            return 0


def parts(job: Job) -> tuple[Forward | Expand, ...]:
    """The passes of a batch, or its trees; none of any other job."""
    if isinstance(job, Batch):
        return job.passes
    return job.jobs if isinstance(job, DraftBatch) else ()


def _without_handles(job: Job) -> object:
    if isinstance(job, Batch):
        return tuple(map(_without_handles, job.passes))
    if isinstance(job, Feed):
        return (job.session, job.start, tuple(some.rows for some in job.rows))
    if not isinstance(job, Forward):
        return job
    hidden = None if job.hidden is None else job.hidden.rows
    return (job.session, job.segment, job.committed, job.rows, job.tokens, hidden, job.sampled_rows)
