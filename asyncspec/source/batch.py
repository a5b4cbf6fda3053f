"""Which trees a token source grows together: the one rule of draft nodes and source nodes. Pure.

A source works on one batch at a time, and whoever asks waits until it is free: the later a question
is put, the newer is the tree it is about. A batch lasts as long as its longest member, so nobody
may be long: prompts are read in pieces of ``READ`` tokens, between which others have their turn.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

from asyncspec.core.jobs import DraftBatch, Job, draft_jobs
from asyncspec_protocol.errors import LocalProtocolError
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Expand, Expanded

READ = 256
"""Most committed tokens a source is told of in one question: four passes of a draft model, about
as many as a tree has levels."""

ROWS = 512
"""Most rows of a batch: tokens it takes in, and nodes of a level."""


def rows(job: Expand) -> int:
    """What a job takes of a batch: the tokens it takes in and one level of its tree."""
    level = max(len(job.frontier), job.beam or job.width) if job.count else 0
    return len(job.committed) + level


def admitted(jobs: Iterable[Expand]) -> tuple[Expand, ...]:
    """As many of the first ``jobs`` as make a batch: always one, and no more than ``ROWS`` rows.
    Takes nothing more from ``jobs`` once one does not fit."""
    batch: list[Expand] = []
    total = 0
    for job in jobs:
        total += rows(job)
        if batch and total > ROWS:
            break
        batch.append(job)
    return tuple(batch)


def batched(jobs: tuple[Expand, ...]) -> Expand | DraftBatch:
    """The job for a device. Who is alone is asked as if there were no batches."""
    return jobs[0] if len(jobs) == 1 else DraftBatch(jobs)


Answers = tuple[tuple[Expand, Expanded], ...]
"""The trees a device was asked for, each with what it has grown."""


def answers(job: Expand | DraftBatch, result: object) -> Answers:
    """The trees a device was asked for, each with what it has grown. Raises
    ``LocalProtocolError`` for a result that is none."""
    grown = result if isinstance(job, DraftBatch) else (result,)
    asked = job.jobs if isinstance(job, DraftBatch) else (job,)
    if not isinstance(grown, tuple) or [*map(type, grown)] != [Expanded] * len(asked):
        raise LocalProtocolError(f"{type(result).__name__} is no answer to {type(job).__name__}")
    return tuple(zip(asked, grown, strict=True))


def one_by_one(answer: Callable[[Expand], Expanded], batch: DraftBatch) -> tuple[Expanded, ...]:
    """A batch for a source that gains nothing by growing trees together."""
    return tuple(map(answer, batch.jobs))


# --- The work of several sessions in step: what all of them need next is computed in one pass.
# Pure.
# A course is the work of one session, written down as if it were alone: a generator that yields
# what must be computed for it before it can go on.

W = TypeVar("W")
R = TypeVar("R")

Coroutine = Generator[W, None, R]
"""Yields needs, ends with a result."""


def run_cobatched(
    coroutines: Sequence[Coroutine[W, R]], compute: Callable[[list[W]], None]
) -> tuple[R, ...]:
    """Run courses to their ends and return their results in that order. ``compute`` is called once
    a step with the next need of every course that has one, so it is called as often as the longest
    of them alone would call it."""
    results: dict[int, R] = {}
    going = dict(enumerate(coroutines))
    while going:
        needs: list[W] = []
        for number, coroutine in tuple(going.items()):
            try:
                needs.append(next(coroutine))
            except StopIteration as end:
                results[number] = end.value
                del going[number]
        if needs:
            compute(needs)
    return tuple(results[number] for number in range(len(coroutines)))


def run_single(coroutine: Coroutine[W, R]) -> R:
    """The result of a course that can do without anybody: what it yields is passed over."""
    (result,) = run_cobatched([coroutine], lambda _: None)
    return result


# --- Which trees nobody waits for any more.


class AbandonedJobs:
    """The last tree of each session that was given up. Noted by one thread while another asks:
    every step is a single operation on a dictionary."""

    def __init__(self) -> None:
        self._jobs: dict[SessionId, Expand] = {}

    def note(self, job: Job) -> None:
        """Nothing more needs to grow for a job, or for any tree of a batch."""
        for draft in draft_jobs(job):
            self._jobs[draft.session] = draft

    def has(self, job: Expand) -> bool:
        """Whether it was given up."""
        return self._jobs.get(job.session) is job

    def forget(self, session: SessionId) -> None:
        """A session is over."""
        self._jobs.pop(session, None)
