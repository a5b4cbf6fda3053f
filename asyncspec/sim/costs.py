"""What passes, drafts and messages cost in virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.costs import DraftCost, LevelCache, StageCost
from asyncspec.core.jobs import Batch, Forward, Job, draft_jobs
from asyncspec.core.rng import GOLDEN, MASK, mix
from asyncspec_protocol.base import TensorSpec
from asyncspec_protocol.framing import frame_bytes
from asyncspec_protocol.ids import Rank, is_draft
from asyncspec_protocol.messages import Message, PruneIndices, Segment, Verdict


class Costs(Protocol):
    """How long things take, in seconds of virtual time."""

    def link(self, source: Rank, target: Rank, message: Message) -> float:
        """From one node to another; a link keeps its order whatever this returns."""

    def device(self, rank: Rank, job: Job) -> float:
        """A job on a node's device."""


class LinkCost(Struct, frozen=True):
    """A first-in first-out link: bytes leave at ``bandwidth``, one message after another, and
    arrive ``latency`` seconds later. So a large tensor delays what is sent behind it."""

    # Seconds, one way.
    latency: float = 0.0
    # Bytes a second; 0: no limit.
    bandwidth: float = 0.0


class Jitter(Struct, frozen=True):
    """Durations vary by up to ``share`` (below 1) of themselves in either direction, evenly: a
    function of what is done (node, segment, version), so that two policies meet the same slow
    passes, whatever the order of simulated events."""

    share: float = 0.0
    seed: int = 0

    def factor(self, *event: int) -> float:
        """The factor for one event, named by some integers."""
        if not self.share:
            return 1.0
        key = mix(self.seed & MASK)
        for number in event:
            key = mix((key + GOLDEN * (number + 2)) & MASK)
        return 1.0 + self.share * ((key >> 11) * 2.0**-52 - 1.0)


class ClusterCost(Struct, frozen=True):
    """The parameters of a cluster; all times in seconds of virtual time."""

    stage: StageCost = StageCost()
    # What a pass takes besides, on links between the devices that share a stage (tensor
    # parallelism).
    exchange: StageCost = StageCost(0.0, 0)
    # Stages that are slower (above 1) or faster than the others, by rank.
    slow: Mapping[int, float] = {}
    draft: DraftCost = DraftCost()
    # What the draft node needs for a verdict (walk, prune, merge) before it can react to it.
    verdict_seconds: float = 0.0
    wire: LinkCost = LinkCost()
    # Values in a row of hidden states, of two bytes each.
    width: int = 4096
    # Processors of the one machine that has all nodes; 0: every node has one of its own.
    processors: int = 0
    jitter: Jitter = Jitter()

    def pass_seconds(self, rank: Rank, rows: int) -> float:
        """A pass of a stage, without jitter."""
        return self.stage.seconds(rows) * self.slow.get(rank, 1.0) + self.exchange.seconds(rows)


class CostModel:
    """``Costs`` of one cluster, and sizes. Called once for each job, in their order."""

    def __init__(self, cost: ClusterCost) -> None:
        self._cost = cost
        self._levels = LevelCache()
        # A message that goes to every stage is measured once.
        self._measured: Message | None = None
        self._nbytes = 0

    def nbytes(self, message: Message) -> int:
        """Length of the real frame with the tensor, of 16-bit values, of real stages."""
        if message is not self._measured:
            match message:
                case Segment(ids=rows, tokens=()) | Verdict(feature_ids=rows):
                    count = len(rows)
                case _:
                    count = 0
            tensor = TensorSpec("float16", (count, self._cost.width)) if count else None
            self._measured, self._nbytes = message, frame_bytes(message, tensor)
        return self._nbytes

    def transfer_seconds(self, message: Message) -> float:
        """Time that a message's bytes take."""
        wire = self._cost.wire
        return self.nbytes(message) / wire.bandwidth if wire.bandwidth else 0.0

    def occupied_seconds(self, message: Message) -> float:
        """For so long a message keeps its direction of a link to itself. Handling a verdict is the
        last part of its transfer: verdicts come over one link, and are handled one by one."""
        seconds = self.transfer_seconds(message)
        return seconds + self._cost.verdict_seconds if type(message) is Verdict else seconds

    def link(self, source: Rank, target: Rank, message: Message) -> float:
        """Latency, jittered."""
        cost = self._cost
        return cost.wire.latency * cost.jitter.factor(1, source, target, *_event(message))

    def device(self, rank: Rank, job: Job) -> float:
        """A pass or a draft; what only changes tables is free."""
        cost = self._cost
        if isinstance(job, Forward | Batch):
            seconds = cost.pass_seconds(rank, job.row_count)
            forward = job.passes[0] if isinstance(job, Batch) else job
            return seconds * cost.jitter.factor(2, rank, forward.session, forward.segment)
        if is_draft(rank) and (trees := draft_jobs(self._levels.uncached(job))):
            first = trees[0]
            factor = cost.jitter.factor(3, first.session, first.version, first.base)
            return cost.draft.seconds(*trees) * factor
        return 0.0


def _event(message: Message) -> tuple[int, ...]:
    """Integers that identify a message on its link."""
    match message:
        case Segment(session, segment) | Verdict(session, segment):
            return (session, segment)
        case PruneIndices(session, version):
            return (session, version)
        case _:
            return ()


# A 7B model in fp16 on four 8 GB boards with 1 Gbit/s between them.
JETSON_7B = ClusterCost(
    stage=StageCost(plateau=16, row_seconds=0.013),
    draft=DraftCost(level_seconds=0.2),
    verdict_seconds=0.15,
    wire=LinkCost(latency=0.03),
)

PRESETS: dict[str, ClusterCost] = {
    # The papers' own accounting: a pass is a turn whatever its rows; seven draft passes fill one.
    "turns": ClusterCost(draft=DraftCost(level_seconds=1 / 7)),
    "jetson-7b": JETSON_7B,
    # A 13B model in four bits on the same boards: passes are long, so the rest weighs less.
    "jetson-13b-int4": ClusterCost(
        stage=JETSON_7B.stage,
        draft=DraftCost(level_seconds=0.065),
        verdict_seconds=0.05,
        wire=LinkCost(latency=0.01),
        width=5120,
    ),
    # Server GPUs: rows are nearly free.
    "server": ClusterCost(
        stage=StageCost(plateau=64, row_seconds=0.002),
        draft=DraftCost(level_seconds=0.15),
        verdict_seconds=0.05,
        wire=LinkCost(latency=0.02),
    ),
    # "jetson-7b" with ten times the latency.
    "slow-links": replace(JETSON_7B, wire=LinkCost(latency=0.3)),
}
"""Real clusters in units of one pass within the plateau: tokens a second are tokens a pass."""


def scaled(cost: ClusterCost, pass_seconds: float) -> ClusterCost:
    """The same cluster with a pass of ``pass_seconds`` and all other times in proportion."""
    ratio = pass_seconds / cost.stage.pass_seconds
    return replace(
        cost,
        stage=replace(
            cost.stage, pass_seconds=pass_seconds, row_seconds=cost.stage.row_seconds * ratio
        ),
        draft=DraftCost(cost.draft.level_seconds * ratio, cost.draft.call_seconds * ratio),
        verdict_seconds=cost.verdict_seconds * ratio,
        wire=replace(cost.wire, latency=cost.wire.latency * ratio),
    )
