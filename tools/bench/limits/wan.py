"""A ring of machines in different cities: 22 to 75 ms from one to the next, stages of 8 ms.

What is in flight follows the bandwidth-delay product: nothing here sets it. All policies have the
same token sources, once the EAGLE head alone and once with n-gram lookup beside it.
"""

from __future__ import annotations

from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.cluster.config import Config, DraftTable, PaceTable, TargetTable
from asyncspec_nodes.local.cluster import local_config
from tools.bench.limits.beds import Speeds, compare
from tools.bench.limits.models import EAGLE_HEAD
from tools.bench.limits.padded import STAGES
from tools.bench.limits.progress import Tick

BED = "wan-ring"
STAGE_SECONDS, LEVEL_SECONDS = 0.008, 0.001
TOKENS = {"flow": 96, "flowspec": 96, "chain": 64, "autoregressive": 20}
SOURCES = {"eagle": EAGLE_HEAD, "mix": f"{EAGLE_HEAD}+ngram"}


class Wan(Speeds, frozen=True):
    """By source and policy."""

    def ratio(self, source: str, policy: str, over: str) -> float:
        """How many times the other policy's tokens per second this policy's are."""
        found = self.speeds[source]
        return found[policy].tokens_per_second / found[over].tokens_per_second


async def measure(tick: Tick) -> Wan:
    """Every opening once with each source and policy. Raises ``AsyncSpecError``."""
    clusters = {name: (BED, _config(source)) for name, source in SOURCES.items()}
    found = await compare(clusters, TOKENS, tick)
    return Wan(found.speeds, found.notes)


def _config(source: str) -> Config:
    return local_config(
        TargetTable(path=str(BUNDLED_TARGET)),
        DraftTable(source=source),
        STAGES,
        1,
        stage_pace=PaceTable(seconds=STAGE_SECONDS),
        draft_pace=PaceTable(level_seconds=LEVEL_SECONDS),
    )
