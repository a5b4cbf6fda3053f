"""Which device jobs are shorter than the hand-over to the device's thread and back."""

from __future__ import annotations

from typing import assert_never

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.jobs import (
    Admit,
    Batch,
    Compact,
    DraftBatch,
    Feed,
    Forward,
    Job,
    Release,
    Trim,
    draft_jobs,
)
from asyncspec_protocol.messages import Expand

JobKind = tuple[type[Job], int]


class ShortJobs:
    """Predicts from measured times whether the next job of a kind is short. Each long job that was
    predicted to be short doubles the run of short ones that its kind needs."""

    def __init__(self) -> None:
        self._proof: dict[JobKind, int] = {}
        self._in_a_row: dict[JobKind, int] = {}

    def expects(self, job: Job) -> bool:
        """Whether a job is predicted to be short."""
        kind = job_kind(job)
        return self._in_a_row.get(kind, 0) >= self._proof.get(kind, PARAMETERS.short_job_proof)

    def observe(self, job: Job, seconds: float) -> None:
        """A job took so many ``seconds``."""
        kind, most = job_kind(job), PARAMETERS.max_short_job_proof
        in_a_row = self._in_a_row.get(kind, 0)
        if seconds <= PARAMETERS.short_job_seconds:
            self._in_a_row[kind] = min(in_a_row + 1, most)
            return
        proof = self._proof.get(kind, PARAMETERS.short_job_proof)
        if in_a_row >= proof:
            self._proof[kind] = min(2 * proof, most)
        self._in_a_row[kind] = 0


def job_kind(job: Job) -> JobKind:
    """Type, and bit length of the size: jobs of one kind differ by less than a factor of two."""
    match job:
        case Forward() | Batch():
            size = job.row_count
        case Compact(keep=keep):
            size = len(keep)
        case Admit(common_prefix=size) | Trim(slots=size):
            pass
        case Expand() | DraftBatch():
            size = sum([one.count + len(one.committed) for one in draft_jobs(job)])
        case Feed(rows=rows):
            size = sum([len(some.rows) for some in rows])
        case Release():
            size = 0
        case _:
            assert_never(job)
    return type(job), size.bit_length()
