"""Costs of a crowd: users with draft devices of their own on one pipeline.

Jitter is lognormal, a function of the seed and of how many durations were asked for before: the
same run has the same jitter every time.
"""

from __future__ import annotations

from msgspec import Struct

from asyncspec.core.jobs import Batch, Forward, Job, draft_jobs
from asyncspec.plugins.dipsd.simulation import DRAFT, LINK, VERIFY, Noise
from asyncspec_protocol.ids import Rank, draft_number, is_draft
from asyncspec_protocol.messages import Message, Segment, Verdict


class Person(Struct):
    """A user with a device: seconds a drafted token, and seconds each way. Both may change while it
    runs."""

    token: float
    link: float = 0.0015


class CrowdCost(Struct):
    """``Costs`` where the user of draft node n is ``people[n]``, and all stages are alike."""

    people: list[Person]
    # Seconds of a pass on each stage, and of each row of it.
    fixed: float = 0.095
    row: float = 0.0005
    # Relative deviation of every duration.
    sigma: float = 0.0
    seed: int = 1
    used: int = 0

    def link(self, source: Rank, target: Rank, message: Message) -> float:
        """Between a user and the pipeline; stages are beside each other."""
        if not isinstance(message, Segment | Verdict):
            return 0.0
        rank = source if is_draft(source) else target
        if not is_draft(rank):
            return 0.0
        return self.people[draft_number(rank)].link * self._factor(LINK)

    def device(self, rank: Rank, job: Job) -> float:
        """A pass by its rows, a draft by its levels."""
        if isinstance(job, Forward | Batch):
            return (self.fixed + self.row * job.row_count) * self._factor(VERIFY)
        if is_draft(rank) and (trees := draft_jobs(job)):
            depth = max(max(1, tree.depth) for tree in trees)
            return self.people[draft_number(rank)].token * depth * self._factor(DRAFT)
        return 0.0

    def _factor(self, kind: int) -> float:
        self.used += 1
        return Noise(self.sigma, self.seed).factor(kind, 0, self.used)
