"""How near the pipeline is to its own limit: stages that take a fixed time and wait for most of it.

A pipeline is at its limit when a turn takes as long as its slowest stage. Efficiency is measured
tokens per second, times that stage's time, over tokens per turn.
"""

from __future__ import annotations

from msgspec import Struct

from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.cluster.config import DraftTable, PaceTable, TargetTable
from asyncspec_nodes.local.cluster import LocalCluster, local_config
from tools.bench.limits.models import EAGLE_HEAD
from tools.bench.limits.progress import Tick
from tools.bench.limits.requests import Speed, speed, turn_about

STAGES, STAGE_SECONDS, LEVEL_SECONDS = 4, 0.040, 0.005
TOKENS = {"flow": 96, "flowspec": 96, "autoregressive": 32}


class Padded(Struct, frozen=True):
    """All policies on the same cluster, interleaved."""

    speeds: dict[str, Speed]

    def efficiency(self, policy: str) -> float:
        """See above; 1 is the limit."""
        found = self.speeds[policy]
        return found.tokens_per_second * STAGE_SECONDS / found.tokens_per_turn

    @property
    def turn(self) -> float:
        """The longest of the policies' turns, in times of the slowest stage's service."""
        return max(found.turn_seconds for found in self.speeds.values()) / STAGE_SECONDS


async def measure(tick: Tick) -> Padded:
    """Every opening once with each policy. Raises ``AsyncSpecError``."""
    config = local_config(
        TargetTable(path=str(BUNDLED_TARGET)),
        DraftTable(source=EAGLE_HEAD),
        STAGES,
        1,
        stage_pace=PaceTable(seconds=STAGE_SECONDS),
        draft_pace=PaceTable(level_seconds=LEVEL_SECONDS),
    )
    async with LocalCluster(config, lambda report: None) as cluster:
        replies = (await turn_about({"": cluster}, TOKENS, tick))[""]
    return Padded({policy: speed(some) for policy, some in replies.items()})
