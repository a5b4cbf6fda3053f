"""The cluster file of a cluster on this machine."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.errors import AsyncSpecError, ClusterError
from asyncspec_nodes.cluster.config import (
    ClusterTable,
    Config,
    DraftTable,
    LimitsTable,
    NodeTable,
    PaceTable,
    SourceTable,
    TargetTable,
    TraceTable,
    to_toml,
)
from asyncspec_nodes.local.forking import SUPPORTED, ForkServerClient
from asyncspec_nodes.local.processes import STOP_SECONDS
from asyncspec_nodes.local.supervisor import ChildNode, name_of
from asyncspec_nodes.node import listen
from asyncspec_nodes.node.reports import Report
from asyncspec_protocol.handshake import role_of
from asyncspec_protocol.ids import DRAFT
from asyncspec_protocol.messages import Role

REJOIN_SECONDS = 5.0
"""Where a lost node does not come back, nothing waits for it for long. One that is started again is
waited for as long as it may take to load; or else the cluster ends."""

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
    """The cluster file of a local cluster; its ports are filled in when its nodes are launched.
    ``apart``: the token source is a process of its own."""
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


# --- Which nodes of a local cluster are started again when they end by themselves, and how often.
# In most engines a worker that dies ends the server. Here the draft node has every committed
# path, so a stage may die and come back while requests wait; but not for ever, as a node that has
# too little memory, say, dies each time it has loaded.


class RestartPolicy(Struct, frozen=True):
    """Nodes of these roles, each so many times within so many seconds."""

    roles: tuple[Role, ...] = ()
    most: int = 3
    seconds: float = 600.0


RESTART_STAGES = RestartPolicy(("verify", "source"))
"""For one's own requests: the answer goes on. With the draft node it would be lost."""

RESTART_ALL = RestartPolicy(("verify", "source", "draft"))
"""For a service: who asks after the draft node's end is served."""


class RestartBudget:
    """What is left of a node's restarts."""

    def __init__(self, restarts: RestartPolicy) -> None:
        self._restarts = restarts
        self._taken: deque[float] = deque()

    def take(self, now: float) -> bool:
        """One more at ``now`` (seconds of any clock), if there may be."""
        while self._taken and now - self._taken[0] > self._restarts.seconds:
            self._taken.popleft()
        if len(self._taken) >= self._restarts.most:
            return False
        self._taken.append(now)
        return True

    @property
    def spent(self) -> str:
        """Why there is none left, in words; empty where none was taken."""
        count = len(self._taken)
        return f" after {count} new starts within {self._restarts.seconds:g} s" if count else ""


# --- How the nodes of a cluster become processes: here, or wherever else somebody makes room.

FILE = "cluster.toml"


class Launcher(Protocol):
    """What a ``LocalCluster`` starts its nodes by. It serves one cluster."""

    def prepare(self, config: Config, folder: Path) -> Config:
        """Make ready, before any node is started: cluster files, say, in ``folder``, which is there
        as long as the cluster. Gives the cluster with the addresses its nodes will have."""

    async def start(self, rank: int, log: Path, *, again: bool) -> ChildNode:
        """Start a node that writes to ``log``; ``again``: it has ended, and its log goes on."""

    async def close(self) -> None:
        """All nodes have ended. Called also where nothing was prepared."""


class LocalLauncher:
    """On this machine, as it is; ports are whatever is free. ``forks``: nodes are forked from one
    process, which imports torch and transformers for all of them (seconds for each of them)."""

    def __init__(self, *, forks: bool = SUPPORTED) -> None:
        self._forks = forks
        self._forking: ForkServerClient | None = None
        # By rank. They listen as long as the cluster lasts: whoever dials a node that is started
        # again waits for it.
        self._sockets: dict[int, socket.socket] = {}

    def prepare(self, config: Config, folder: Path) -> Config:
        """See ``Launcher``."""
        # The sockets listen before anybody dials them, and no port is free for a moment between.
        self._sockets = {node.rank: listen.loopback() for node in config.nodes}
        ports = {rank: sock.getsockname()[1] for rank, sock in self._sockets.items()}
        self._config = _with_ports(config, ports)
        self._file = folder / FILE
        self._file.write_text(to_toml(self._config), encoding="utf-8")
        self._forking = ForkServerClient(self._file, folder) if self._forks else None
        return self._config

    async def start(self, rank: int, log: Path, *, again: bool) -> ChildNode:
        """See ``Launcher``."""
        role = role_of(rank, self._config.stages)
        return await ChildNode.start(
            rank, role, self._file, self._sockets[rank], log, forking=self._forking, again=again
        )

    async def close(self) -> None:
        """See ``Launcher``."""
        if self._forking is not None:
            await self._forking.close()
        for sock in self._sockets.values():
            sock.close()


def _with_ports(config: Config, ports: dict[int, int]) -> Config:
    nodes = tuple(replace(node, port=ports[node.rank]) for node in config.node)
    source = config.source
    if source is not None:
        source = replace(source, port=ports[config.stages + 1])
    return replace(config, node=nodes, source=source)


# --- A whole cluster on this machine: one draft node and N stages as processes, linked over TCP.

START_SECONDS = 600.0
"""A cluster that has not loaded its models by then is given up."""

RESTART_NONE = RestartPolicy()
"""Where a node's end is to be noticed: in measurements, say."""


class LocalCluster:
    """Use it as an asynchronous context: inside, every node of the file has loaded and serves.

    ``launch`` starts them, on this machine unless it says otherwise. ``scratch``: where the folder
    of its files is made, if not where the machine keeps such. ``restarts``: which of them are
    started again when they end by themselves; ``say`` is told so, a line each time.
    """

    def __init__(
        self,
        config: Config,
        progress: Callable[[Report], None],
        logs: Path | None = None,
        *,
        launch: Launcher | None = None,
        scratch: Path | None = None,
        restarts: RestartPolicy = RESTART_NONE,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        if restarts.roles:
            limits = replace(config.limits, rejoin_seconds=START_SECONDS)
            config = replace(config, limits=limits)
        # With the addresses of the nodes, once they were launched.
        self.config = config
        self._progress = progress
        self._logs = logs
        self._restarts = restarts
        self._say = say
        self._launch = launch or LocalLauncher()
        self._scratch = scratch
        self._stopping = False
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._children: list[ChildNode] = []
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
        await self._launch.close()
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
        self._folder = tempfile.TemporaryDirectory(prefix="asyncspec-", dir=self._scratch)
        self.config = self._launch.prepare(self.config, Path(self._folder.name))
        try:
            async with asyncio.timeout(START_SECONDS):
                for place in range(len(self.config.nodes)):
                    self._children.append(await self._child(place))
                    self._watches.append(asyncio.create_task(self._keep(place)))
                await self._loaded()
        except TimeoutError:
            serving = {child.rank for child in self._children if child.serving}
            ranks = [node.rank for node in self.config.nodes if node.rank not in serving]
            late = ", ".join(name_of(rank, role_of(rank, self.config.stages)) for rank in ranks)
            raise ClusterError(f"{late} did not load within {START_SECONDS:g} s") from None

    async def _child(self, place: int, *, again: bool = False) -> ChildNode:
        assert self._folder is not None
        rank = self.config.nodes[place].rank
        log = (self._logs or Path(self._folder.name)) / f"rank-{rank}.log"
        return await self._launch.start(rank, log, again=again)

    async def _keep(self, place: int) -> AsyncSpecError:
        """A node for as long as it lives, and is started again; what its last end means."""
        allowance = RestartBudget(self._restarts)
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
        started = len(self._children) == len(self.config.nodes)
        if started and all(child.serving for child in self._children):
            self._serving.set()

    async def _loaded(self) -> None:
        serving = asyncio.create_task(self._serving.wait())
        try:
            await asyncio.wait((serving, *self._watches), return_when=asyncio.FIRST_COMPLETED)
        finally:
            serving.cancel()
        if any(watch.done() for watch in self._watches):
            raise await self.watch()
