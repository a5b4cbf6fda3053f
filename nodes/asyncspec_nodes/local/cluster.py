"""A whole cluster on this machine: one draft node and N stages as processes, linked over TCP."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from msgspec.structs import replace

from asyncspec.errors import AsyncSpecError, ClusterError
from asyncspec_nodes.cluster.config import to_toml
from asyncspec_nodes.cluster.config_tables import (
    ClusterTable,
    Config,
    DraftTable,
    LimitsTable,
    NodeTable,
    PaceTable,
    SourceTable,
    TargetTable,
    TraceTable,
)
from asyncspec_nodes.local.restarts import Allowance, Restarts
from asyncspec_nodes.local.supervisor import STOP_SECONDS, Child
from asyncspec_nodes.node import listen
from asyncspec_nodes.node.reports import Report
from asyncspec_protocol.handshake import role_of
from asyncspec_protocol.ids import DRAFT

START_SECONDS = 600.0
"""A cluster that has not loaded its models by then is given up."""

REJOIN_SECONDS = 5.0
"""Where a lost node does not come back, nothing waits for it for long. One that is started again is
waited for as long as it may take to load; or else the cluster ends."""


NEVER = Restarts()
"""Where a node's end is to be noticed: in measurements, say."""

FILE = "cluster.toml"

TRACED = TraceTable(events=200_000, text=True)
"""A run that is traced is traced from its nodes' first steps on."""


def local_config(
    target: TargetTable,
    draft: DraftTable,
    stages: int,
    sessions: int,
    *,
    traced: bool = False,
    apart: bool = False,
    stage_pace: PaceTable | None = None,
    draft_pace: PaceTable | None = None,
) -> Config:
    """The cluster file of a local cluster; its ports are filled in by ``LocalCluster``. ``apart``:
    the token source is a process of its own."""
    pace = dict.fromkeys(range(1, stages + 1), stage_pace) | {
        stages + 1 if apart else 0: draft_pace
    }
    return Config(
        cluster=ClusterTable(name=f"local-{os.getpid()}", stages=stages),
        target=target,
        draft=draft,
        limits=LimitsTable(sessions=sessions, rejoin_seconds=REJOIN_SECONDS),
        trace=TRACED if traced else TraceTable(),
        source=SourceTable(host="127.0.0.1", port=1) if apart else None,
        pace={rank: table for rank, table in pace.items() if table is not None},
        node=tuple(NodeTable(rank=r, host="127.0.0.1", port=1) for r in range(stages + 1)),
    )


class LocalCluster:
    """Use it as an asynchronous context: inside, every node of the file has loaded and serves.

    ``restarts``: which of them are started again when they end by themselves; ``say`` is told so,
    a line each time.
    """

    def __init__(
        self,
        config: Config,
        progress: Callable[[Report], None],
        logs: Path | None = None,
        *,
        restarts: Restarts = NEVER,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        if restarts.roles:
            limits = replace(config.limits, rejoin_seconds=START_SECONDS)
            config = replace(config, limits=limits)
        # With the ports of the nodes, once they were started.
        self.config = config
        self._progress = progress
        self._logs = logs
        self._restarts = restarts
        self._say = say
        self._stopping = False
        # They listen as long as the cluster lasts: whoever dials a node that is started again
        # waits for it.
        self._sockets: list[socket.socket] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._children: list[Child] = []
        self._watches: list[asyncio.Task[AsyncSpecError]] = []
        self._serving = asyncio.Event()

    @property
    def address(self) -> tuple[str, int]:
        """Where the draft node serves clients."""
        draft = self.config.at(DRAFT)
        return draft.host, draft.port

    @property
    def pids(self) -> tuple[int, ...]:
        """The nodes' processes, by rank."""
        return tuple(child.process.pid for child in self._children)

    @property
    def guarantee(self) -> str:
        """What every stage's self-test vouches for: "bitwise", or else "tolerance"."""
        verify = (c for c in self._children if c.role == "verify")
        seen = {child.serving.guarantee for child in verify if child.serving}
        return "bitwise" if seen == {"bitwise"} else "tolerance"

    async def __aenter__(self) -> LocalCluster:
        try:
            await self._start()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopping = True
        await asyncio.gather(*(child.stop() for child in self._children))
        if self._watches:
            # One of them may be starting a node, which it then stops.
            await asyncio.wait(self._watches, timeout=2 * STOP_SECONDS)
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        for sock in self._sockets:
            sock.close()
        if self._folder is not None:
            self._folder.cleanup()

    async def watch(self) -> AsyncSpecError:
        """Wait for the first node that ends by itself and is not started again; what its end
        means."""
        done, _ = await asyncio.wait(self._watches, return_when=asyncio.FIRST_COMPLETED)
        ended = [task.result() for task in done]
        # A mistake of the user's says more than another node's loss of a peer.
        return next((e for e in ended if not isinstance(e, ClusterError)), ended[0])

    async def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="asyncspec-")
        folder = Path(self._folder.name)
        # The sockets listen before anybody dials them, and no port is free for a moment between.
        self._sockets = [listen.loopback() for _ in self.config.nodes]
        self.config = _with_ports(self.config, [s.getsockname()[1] for s in self._sockets])
        (folder / FILE).write_text(to_toml(self.config), encoding="utf-8")
        for place in range(len(self._sockets)):
            self._children.append(await self._child(place))
            self._watches.append(asyncio.create_task(self._keep(place)))
        await self._loaded()

    async def _child(self, place: int, *, again: bool = False) -> Child:
        assert self._folder is not None
        folder = Path(self._folder.name)
        rank = self.config.nodes[place].rank
        role, log = role_of(rank, self.config.stages), (self._logs or folder) / f"rank-{rank}.log"
        return await Child.start(rank, role, folder / FILE, self._sockets[place], log, again=again)

    async def _keep(self, place: int) -> AsyncSpecError:
        """A node for as long as it lives, and is started again; what its last end means."""
        allowance = Allowance(self._restarts)
        while True:
            child = self._children[place]
            error = await child.watch(self._heard)
            # A mistake of the user's stays one, and so does what fails before all have served.
            may = isinstance(error, ClusterError) and child.role in self._restarts.roles
            if self._stopping or not may or not self._serving.is_set():
                return error
            if not allowance.take(time.monotonic()):
                return ClusterError(f"{error}{allowance.spent}")
            self._say(f"{error}; it is started again")
            await child.stop()  # what it has left behind
            self._children[place] = await self._child(place, again=True)
            if self._stopping:
                await self._children[place].stop()

    def _heard(self, report: Report) -> None:
        if not self._serving.is_set():
            self._progress(report)
        if all(child.serving for child in self._children):
            self._serving.set()

    async def _loaded(self) -> None:
        serving = asyncio.create_task(self._serving.wait())
        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.wait((serving, *self._watches), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            late = ", ".join(child.name for child in self._children if not child.serving)
            raise ClusterError(f"{late} did not load within {START_SECONDS:g} s") from None
        finally:
            serving.cancel()
        if any(watch.done() for watch in self._watches):
            raise await self.watch()


def _with_ports(config: Config, ports: list[int]) -> Config:
    nodes = tuple(replace(n, port=port) for n, port in zip(config.node, ports, strict=False))
    source = None if config.source is None else replace(config.source, port=ports[-1])
    return replace(config, node=nodes, source=source)
