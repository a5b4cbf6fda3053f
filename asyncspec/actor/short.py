"""Which jobs are shorter than the way to the device's thread and back. Pure.

Law of this file: a kind of job is short only for as long as it is measured to be, and every time
one turns out long, the next proof has to be twice as good.
"""

from __future__ import annotations

from typing import assert_never

from asyncspec.jobs import (
    Admit,
    Batch,
    Compact,
    Drafting,
    Feed,
    Forward,
    Job,
    Release,
    Trim,
    drafts,
)
from asyncspec_protocol.messages import Expand

SHORT_SECONDS = 60e-6
"""What it takes to wake a thread that sleeps, and the event loop again, costs more than this."""

PROOF = 8
"""Short ones in a row after which a kind counts as short."""

MOST_PROOF = 4096
"""So that a kind which is long once in a while gets another chance at last."""

Kind = tuple[type[Job], int]


class ShortJobs:
    """Learns from times what a job of the same type and about the same size will take."""

    def __init__(self) -> None:
        self._proof: dict[Kind, int] = {}
        self._in_a_row: dict[Kind, int] = {}

    def expected(self, job: Job) -> bool:
        """Whether the next job like this one will be short."""
        kind = kind_of(job)
        return self._in_a_row.get(kind, 0) >= self._proof.get(kind, PROOF)

    def took(self, job: Job, seconds: float) -> None:
        """A job is over. A long one that was expected to be short makes the kind's proof harder."""
        kind = kind_of(job)
        in_a_row = self._in_a_row.get(kind, 0)
        if seconds <= SHORT_SECONDS:
            self._in_a_row[kind] = min(in_a_row + 1, MOST_PROOF)
            return
        proof = self._proof.get(kind, PROOF)
        if in_a_row >= proof:
            self._proof[kind] = min(2 * proof, MOST_PROOF)
        self._in_a_row[kind] = 0


def kind_of(job: Job) -> Kind:
    """Type, and magnitude of the size: jobs of one kind differ by less than a factor of two."""
    match job:
        case Forward() | Batch():
            size = job.row_count
        case Compact(keep=keep):
            size = len(keep)
        case Admit(shared=size) | Trim(slots=size):
            pass
        case Expand() | Drafting():
            size = sum([one.count + len(one.committed) for one in drafts(job)])
        case Feed(rows=rows):
            size = sum([len(some.rows) for some in rows])
        case Release():
            size = 0
        case _:
            assert_never(job)
    return type(job), size.bit_length()
