"""A longer pipeline: every stage books every segment, so a token costs so much a stage.

Real stages need a layer each, and the bundled target has eight: all real pipelines share one that
is enlarged to sixteen, whose further layers add nothing to what it says (``bench enlarge``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from asyncspec.core.errors import ClusterError
from asyncspec.sim.language import Synthetic
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.cluster.checkpoints import BUNDLED_DRAFT, BUNDLED_TARGET
from asyncspec_nodes.cluster.config import DraftTable, TargetTable
from asyncspec_nodes.local.cluster import LocalCluster, local_config
from asyncspec_nodes.simulation.cluster import Setting, simulate
from tools.bench.enlarge import Size, enlarge, read_config, size_of
from tools.bench.growth.context import curves
from tools.bench.growth.curve import Curve
from tools.bench.growth.timing import no_collector
from tools.bench.limits.cpu_time import cpu_seconds
from tools.bench.limits.progress import Tick
from tools.bench.limits.requests import OPENINGS, WARM_UP_TOKENS, ask

SIMULATED = REAL = (1, 2, 4, 8, 16)
POLICIES = ("autoregressive", "flowspec")
TOKENS, REAL_TOKENS, REPEATS = 256, 64, 3


def measure(
    tick: Tick, simulated: Sequence[int] = SIMULATED, real: Sequence[int] = REAL
) -> list[Curve]:
    """Time on a core per token, of all machines together and per stage. Raises
    ``AsyncSpecError``."""
    return [*_simulated(tick, simulated), *(_real(tick, real) if real else ())]


def _simulated(tick: Tick, sizes: Sequence[int]) -> list[Curve]:
    found = []
    for stages in sizes:
        costs = [_engine(policy, stages) for policy in POLICIES]
        found.append([cost for per_token, per_step in costs for cost in (per_token, per_step)])
        tick()
    names = [f"simulated {policy}, {per}" for policy in POLICIES for per in ("a token", "a step")]
    return curves(names, "stages", "us", sizes, found, scale=1e6)


def _engine(policy: str, stages: int) -> tuple[float, float]:
    """Seconds per token and per step of a machine: the least of some runs, for what disturbs a run
    only adds. With them goes what the engine itself takes: events, stand-ins for devices."""
    setting = Setting(Synthetic(), stages=stages, tokens=TOKENS)
    best, steps = float("inf"), 1
    for _ in range(REPEATS):
        with no_collector():
            start = time.process_time()
            steps = simulate(setting, policy).steps
            best = min(best, time.process_time() - start)
    return best / TOKENS, best / steps


def _real(tick: Tick, sizes: Sequence[int]) -> list[Curve]:
    found: list[list[float]] = []
    texts: set[tuple[int, ...]] = set()
    with TemporaryDirectory() as folder:
        old = size_of(read_config(BUNDLED_TARGET))
        size = Size(old.hidden, old.feed_forward, max(old.layers, *SIMULATED))
        enlarge(BUNDLED_TARGET, Path(folder), size, torch.float32)
        for stages in sizes:
            answers = asyncio.run(_cluster(Path(folder), stages))
            found.append([cost for cost, _ in answers])
            texts.update(text for _, text in answers)
            tick()
    if len(texts) > 1:
        raise ClusterError("two ways to the same answer have led to different texts")
    names = [f"processes {policy}, a token" for policy in POLICIES]
    return curves(names, "stages", "ms", sizes, found, scale=1e3)


async def _cluster(target: Path, stages: int) -> list[Answer]:
    """An answer by every policy. Raises ``ClusterError``."""
    table = TargetTable(path=str(target), dtype="fp32")
    config = local_config(table, DraftTable(source=str(BUNDLED_DRAFT)), stages, 1)
    async with LocalCluster(config, lambda report: None) as cluster:
        client = await Client.connect(*cluster.address, config.cluster.name)
        try:
            return [await _answer(client, cluster.pids, policy) for policy in POLICIES]
        finally:
            await client.close()


Answer = tuple[float, tuple[int, ...]]
"""Seconds on all cores per token after the first, and the tokens."""


async def _answer(client: Client, pids: Sequence[int], policy: str) -> Answer:
    await ask(client, OPENINGS[0], policy, WARM_UP_TOKENS)
    costs = []
    for tokens in (1, REAL_TOKENS):
        before = sum(map(cpu_seconds, pids))
        reply = await ask(client, OPENINGS[0], policy, tokens)
        costs.append(sum(map(cpu_seconds, pids)) - before)
    return (costs[1] - costs[0]) / (REAL_TOKENS - 1), reply.tokens
