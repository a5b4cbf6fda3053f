"""A ring of machines in different cities: 22 to 75 ms from one to the next, stages of 8 ms.

What is in flight follows the bandwidth-delay product: nothing here sets it. All policies have the
same token sources, once the EAGLE head alone and once with n-gram lookup beside it.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

from msgspec import Struct

from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.cluster.config_tables import Config, DraftTable, PaceTable, TargetTable
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
SOURCES = {"eagle": EAGLE_HEAD, "mix": f"{EAGLE_HEAD}+ngram"}


class Wan(Struct, frozen=True):
    """By source and policy."""

    speeds: dict[str, dict[str, Speed]]
    # What of the bed does not hold here.
    notes: tuple[str, ...]

    def ratio(self, source: str, policy: str) -> float:
        """How many times this policy's tokens per second FlowSpec's are."""
        found = self.speeds[source]
        return found["flowspec"].tokens_per_second / found[policy].tokens_per_second


async def measure(tick: Tick) -> Wan:
    """Every opening once with each source and policy. Raises ``AsyncSpecError``."""
    async with AsyncExitStack() as stack:
        clusters, notes = {}, []
        for name, source in SOURCES.items():
            bed = stack.enter_context(Bed.open(load(BED)))
            notes += bed.notes
            cluster = BedCluster(bed, _config(source), lambda report: None)
            clusters[name] = await stack.enter_async_context(cluster)
        replies = await turn_about(clusters, TOKENS, tick)
    speeds = {
        source: {policy: speed(some) for policy, some in found.items()}
        for source, found in replies.items()
    }
    return Wan(speeds, tuple(dict.fromkeys(notes)))


def _config(source: str) -> Config:
    return local_config(
        TargetTable(path=str(BUNDLED_TARGET)),
        DraftTable(source=source),
        STAGES,
        1,
        stage_pace=PaceTable(seconds=STAGE_SECONDS),
        draft_pace=PaceTable(level_seconds=LEVEL_SECONDS),
    )
