"""The parts that need a service over HTTP, each on a cluster as it needs one."""

from __future__ import annotations

from asyncspec_nodes.cluster.checkpoints import BUNDLED_DRAFT, BUNDLED_TARGET, NGRAM
from asyncspec_nodes.cluster.config import Config, DraftTable, PaceTable, TargetTable
from asyncspec_nodes.local.cluster import local_config
from tools.bench.serving import fairness, memory
from tools.bench.serving.fairness import Fairness
from tools.bench.serving.memory import Memory
from tools.bench.serving.service import served

STAGES, SESSIONS = 2, 8
PACE = PaceTable(seconds=0.010, plateau=64, row_seconds=0.0001)
"""Of the stages that many share: they wait for most of it."""


async def measure_fairness() -> Fairness:
    """Raises ``AsyncSpecError``, as all of these do."""
    async with served(_config(PACE)) as service:
        return await fairness.measure(service)


async def measure_memory() -> Memory:
    """On stages that do not wait."""
    async with served(_config(None, source=NGRAM)) as service:
        return await memory.measure(service)


def _config(pace: PaceTable | None, source: str = str(BUNDLED_DRAFT)) -> Config:
    table = DraftTable(source=source)
    return local_config(
        TargetTable(path=str(BUNDLED_TARGET)), table, STAGES, SESSIONS, stage_pace=pace
    )
