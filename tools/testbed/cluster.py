"""A cluster of real node processes, one on each device of a bed."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from asyncspec_nodes.cluster.config_tables import Config
from asyncspec_nodes.local.cluster import LocalCluster
from asyncspec_nodes.local.supervisor import Child
from asyncspec_nodes.node.reports import Report
from asyncspec_protocol.handshake import role_of
from tools.testbed.bed import Bed
from tools.testbed.cluster_file import addressed, check_size, cluster_file
from tools.testbed.routes import Address


class BedCluster(LocalCluster):
    """As a local cluster, but device ``r`` has rank ``r``; an asynchronous context."""

    def __init__(
        self,
        bed: Bed,
        config: Config,
        progress: Callable[[Report], None],
        logs: Path | None = None,
    ) -> None:
        """Raises ``UserError`` where devices and ranks are not as many."""
        check_size(bed.description, config)
        super().__init__(addressed(config, list(bed.devices)), progress, logs)
        self._bed = bed

    async def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="asyncspec-bed-")
        folder = Path(self._folder.name)
        for rank in range(len(self._bed.devices)):
            file = folder / f"cluster-{rank}.toml"
            text = cluster_file(self.config, self._seen_from(rank), self._bed.description)
            file.write_text(text, encoding="utf-8")
            log = (self._logs or folder) / f"rank-{rank}.log"
            child = await self._node(rank, file, log)
            self._children.append(child)
            self._watches.append(asyncio.create_task(child.watch(self._heard)))
        await self._loaded()

    def _seen_from(self, rank: int) -> list[Address]:
        others = range(len(self._bed.devices))
        return [self._bed.devices[o] if o == rank else self._bed.reach(rank, o) for o in others]

    async def _node(self, rank: int, file: Path, log: Path) -> Child:
        role = role_of(rank, self.config.stages)
        command = [*self._bed.prefix(rank), sys.executable, "-P", "-m", "asyncspec_nodes.node.cli"]
        command += ["--role", role, "--rank", str(rank), "--config", str(file), "--supervised"]
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        return Child(rank, role, process, log)
