"""Clusters on the test bed that are asked in turn."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack

from msgspec import Struct

from asyncspec_nodes.cluster.config import Config
from tools.bench.limits.progress import Tick
from tools.bench.limits.requests import Speed, speed, turn_about
from tools.testbed.bed import Bed
from tools.testbed.cluster import BedCluster
from tools.testbed.description import load


class Speeds(Struct, frozen=True):
    """By cluster and policy."""

    speeds: dict[str, dict[str, Speed]]
    # What of the beds does not hold here.
    notes: tuple[str, ...]


async def compare(
    clusters: Mapping[str, tuple[str, Config]], tokens: Mapping[str, int], tick: Tick
) -> Speeds:
    """Every opening on every cluster, each on a bed of its own (the bed's name and the cluster's
    file), with every policy, interleaved. Raises ``AsyncSpecError``."""
    notes: list[str] = []
    async with AsyncExitStack() as stack:
        running = {}
        for name, (place, config) in clusters.items():
            bed = stack.enter_context(Bed.open(load(place)))
            notes += bed.notes
            cluster = BedCluster(bed, config, lambda report: None)
            running[name] = await stack.enter_async_context(cluster)
        replies = await turn_about(running, tokens, tick)
    speeds = {
        name: {policy: speed(some) for policy, some in found.items()}
        for name, found in replies.items()
    }
    return Speeds(speeds, tuple(dict.fromkeys(notes)))
