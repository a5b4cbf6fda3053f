"""A ring of machines in different cities: 22 to 75 ms from one to the next, stages of 8 ms."""

from __future__ import annotations

from msgspec import Struct

from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.cluster.config_tables import DraftTable, PaceTable, TargetTable
from asyncspec_nodes.local.cluster import local_config
from tools.bench.limits.asking import Speed, speed, turn_about
from tools.bench.limits.models import EAGLE_HEAD
from tools.bench.limits.padded import STAGES
from tools.bench.limits.progress import Tick
from tools.testbed.bed import Bed
from tools.testbed.cluster import BedCluster
from tools.testbed.description import load

BED = "wan-ring"
STAGE_SECONDS, LEVEL_SECONDS = 0.008, 0.001
TOKENS = {"flowspec": 96, "chain": 64, "autoregressive": 20}


class Wan(Struct, frozen=True):
    """By policy."""

    speeds: dict[str, Speed]
    # What of the bed does not hold here.
    notes: tuple[str, ...]

    def ratio(self, policy: str) -> float:
        """How many times this policy's tokens per second FlowSpec's are."""
        found = self.speeds
        return found["flowspec"].tokens_per_second / found[policy].tokens_per_second


async def measure(tick: Tick) -> Wan:
    """Every opening once with each policy. Raises ``AsyncSpecError``."""
    config = local_config(
        TargetTable(path=str(BUNDLED_TARGET)),
        DraftTable(source=EAGLE_HEAD),
        STAGES,
        1,
        stage_pace=PaceTable(seconds=STAGE_SECONDS),
        draft_pace=PaceTable(level_seconds=LEVEL_SECONDS),
    )
    with Bed.open(load(BED)) as bed:
        async with BedCluster(bed, config, lambda report: None) as cluster:
            replies = (await turn_about({BED: cluster}, TOKENS, tick))[BED]
    return Wan({policy: speed(some) for policy, some in replies.items()}, bed.notes)
