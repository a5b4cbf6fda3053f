"""Which trees a token source grows together: the one rule of draft nodes and source nodes.

A source works on one batch at a time, and requests wait until it is free: the later one is made,
the newer is its tree. A batch lasts as long as its longest member, so prompts are read in chunks of
``max_draft_tokens``, between which other sessions are served.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.jobs import DraftBatch, Job, draft_jobs
from asyncspec_protocol.errors import LocalProtocolError
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Expand, Expanded


def rows(job: Expand) -> int:
    """What a job takes of a batch: the tokens it takes in and one level of its tree."""
    level = max(len(job.frontier), job.beam or job.width) if job.count else 0
    return len(job.committed) + level


def admitted(jobs: Iterable[Expand]) -> tuple[Expand, ...]:
    """As many of the first ``jobs`` as make a batch: always one, and no more than
    ``max_draft_rows`` rows. Takes nothing more from ``jobs`` once one does not fit."""
    batch: list[Expand] = []
    total = 0
    for job in jobs:
        total += rows(job)
        if batch and total > PARAMETERS.max_draft_rows:
            break
        batch.append(job)
    return tuple(batch)


def batched(jobs: tuple[Expand, ...]) -> Expand | DraftBatch:
    """The job for a device."""
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


W = TypeVar("W")
R = TypeVar("R")

Coroutine = Generator[W, None, R]
"""The work of one session: yields what must be computed before it goes on, ends with a result."""


def run_cobatched(
    coroutines: Sequence[Coroutine[W, R]], compute: Callable[[list[W]], None]
) -> tuple[R, ...]:
    """Run coroutines to their ends; their results in that order. ``compute`` is called once a step
    with the next need of every coroutine that has one: as often as for the longest of them alone.
    """
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


class AbandonedJobs:
    """The last abandoned tree of each session. Written by one thread while another reads: every
    step is a single operation on a dictionary."""

    def __init__(self) -> None:
        self._jobs: dict[SessionId, Expand] = {}

    def note(self, job: Job) -> None:
        """Nothing more needs to grow for a job, or for any tree of a batch."""
        for draft in draft_jobs(job):
            self._jobs[draft.session] = draft

    def has(self, job: Expand) -> bool:
        """Whether it was abandoned."""
        return self._jobs.get(job.session) is job

    def forget(self, session: SessionId) -> None:
        """A session is over."""
        self._jobs.pop(session, None)
