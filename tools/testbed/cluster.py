"""A cluster of real node processes, one on each device of a bed."""

from __future__ import annotations

from pathlib import Path

from asyncspec_nodes.cluster.config import Config
from asyncspec_nodes.local.children import Again, ChildNode
from asyncspec_nodes.local.cluster import LocalCluster, LocalLauncher
from asyncspec_nodes.node.reports import ReportSink
from asyncspec_protocol.links import role_of
from tools.testbed.bed import Bed
from tools.testbed.cluster_file import addressed, check_fit, cluster_file
from tools.testbed.routes import Address


class BedCluster(LocalCluster):
    """As a local cluster, but device ``r`` has rank ``r``; an asynchronous context."""

    def __init__(
        self,
        bed: Bed,
        config: Config,
        progress: ReportSink,
        logs: Path | None = None,
    ) -> None:
        """Raises ``UserError`` where devices and ranks do not fit."""
        check_fit(bed.description, config)
        super().__init__(config, progress, logs, launch=BedLaunch(bed), scratch=bed.scratch)


class BedLaunch(LocalLauncher):
    """Starts each node on its device of a bed, with its own cluster file, which names a peer where
    the right link begins."""

    def __init__(self, bed: Bed) -> None:
        super().__init__(forks=False)
        self._bed = bed

    def prepare(self, config: Config, folder: Path) -> Config:
        """See ``LocalLauncher``."""
        self._config = addressed(config, list(self._bed.devices))
        self._folder = folder
        return self._config

    async def start(self, rank: int, log: Path, *, again: Again) -> ChildNode:
        """See ``LocalLauncher``."""
        file = self._folder / f"cluster-{rank}.toml"
        text = cluster_file(self._config, self._seen_from(rank), self._bed.description)
        file.write_text(text, encoding="utf-8")
        role, prefix = role_of(rank, self._config.stages), self._bed.prefix(rank)
        return await ChildNode.start(rank, role, file, None, log, prefix=prefix, again=again)

    def _seen_from(self, rank: int) -> list[Address]:
        others = range(len(self._bed.devices))
        return [self._bed.devices[o] if o == rank else self._bed.reach(rank, o) for o in others]
