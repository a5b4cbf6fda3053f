"""What a cluster's work costs in virtual time: stages, draft node, links, jitter. No clock."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from asyncspec.jobs import Batch, Forward, Job, Release, drafts
from asyncspec.sim.draft_cost import DraftCost
from asyncspec.sim.draft_levels import KnownLevels
from asyncspec.sim.jitter import Jitter
from asyncspec.sim.link_cost import LinkCost
from asyncspec.sim.sizes import Sizes
from asyncspec.sim.stage_cost import StageCost
from asyncspec_protocol.ids import Rank, is_draft
from asyncspec_protocol.messages import (
    Message,
    PruneIndices,
    Segment,
    Verdict,
)


class ClusterCost(Struct, frozen=True):
    """The parameters of a cluster; all times in seconds of virtual time."""

    stage: StageCost = StageCost()
    # Stages that are slower (above 1) or faster than the others, by rank.
    slow: Mapping[int, float] = {}
    draft: DraftCost = DraftCost()
    # What the draft node needs for a verdict (walk, prune, merge) before it can react to it.
    verdict_seconds: float = 0.0
    wire: LinkCost = LinkCost()
    # Values in a row of hidden states, of two bytes each.
    width: int = 4096
    jitter: Jitter = Jitter()


class Pricing:
    """A ``ClusterCost`` as the simulator of one cluster asks for it, about each job once, in their
    order (see ``Costs`` and ``Wires``)."""

    def __init__(self, cost: ClusterCost) -> None:
        self._cost = cost
        self._levels = KnownLevels()
        self.nbytes = Sizes(cost.width)

    def carried(self, message: Message) -> float:
        """Time of the bytes."""
        wire = self._cost.wire
        return wire.occupied(self.nbytes(message)) if wire.bandwidth else 0.0

    def occupied(self, source: Rank, target: Rank, message: Message) -> float:
        """Time of the bytes. Handling a verdict is the last part of its transfer: verdicts come
        over one link, so they are handled one after another."""
        seconds = self.carried(message)
        return seconds + self._cost.verdict_seconds if type(message) is Verdict else seconds

    def link(self, source: Rank, target: Rank, message: Message) -> float:
        """Latency, jittered."""
        cost = self._cost
        if not cost.jitter.share:
            return cost.wire.latency
        return cost.wire.latency * cost.jitter.factor(1, source, target, *_event(message))

    def device(self, rank: Rank, job: Job) -> float:
        """A pass or a draft; what only changes tables is free. A source computes a level once."""
        cost = self._cost
        if isinstance(job, Forward | Batch):
            seconds = cost.stage.seconds(job.row_count) * cost.slow.get(rank, 1.0)
            if not cost.jitter.share:
                return seconds
            one = job.passes[0] if isinstance(job, Batch) else job
            return seconds * cost.jitter.factor(2, rank, one.session, one.segment)
        if not is_draft(rank):
            return 0.0
        if isinstance(job, Release):
            self._levels.forget(job.session)
        elif trees := drafts(self._levels.rest(job)):
            first = trees[0]
            factor = cost.jitter.factor(3, first.session, first.version, first.base)
            return cost.draft.seconds(*trees) * factor
        return 0.0


def _event(message: Message) -> tuple[int, ...]:
    """What tells a message from others on its link."""
    match message:
        case Segment(session, segment) | Verdict(session, segment):
            return (session, segment)
        case PruneIndices(session, version):
            return (session, version)
        case _:
            return ()
