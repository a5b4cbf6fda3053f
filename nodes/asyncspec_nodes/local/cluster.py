"""A cluster on this machine: its nodes as processes, linked over TCP, and how far they load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console
from rich.live import Live
from rich.table import Table

from asyncspec.backend.base import DEFAULT_OPTIONS, EngineOptions
from asyncspec.core.errors import AsyncSpecError, ClusterError, UserError
from asyncspec_nodes.cluster.config import (
    STARTED,
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
from asyncspec_nodes.cluster.file import to_toml
from asyncspec_nodes.local.children import (
    FORKS,
    STOP_SECONDS,
    Again,
    ChildNode,
    ForkServerClient,
    name_of,
)
from asyncspec_nodes.node import listen
from asyncspec_nodes.node.reports import LoadingReport, ReadyReport, Report, ReportSink
from asyncspec_nodes.node.resources import raise_file_limit
from asyncspec_nodes.node.supervisor import PERIOD_SECONDS, RESTARTS, RestartBudget
from asyncspec_protocol.ids import DRAFT
from asyncspec_protocol.links import role_of

FILE = "cluster.toml"
READY = "ready"
"""The last loading step."""

START_SECONDS = 600.0
"""Time for all nodes to load."""

REJOIN_SECONDS = 5.0
"""``[limits] rejoin_seconds`` without restarts; with restarts it is ``START_SECONDS``."""

TRACED = TraceTable(events=200_000, text=True)
"""A traced run records from the nodes' first steps on."""


class LoadingSteps:
    """A ``ReportSink`` that keeps each node's name and loading step, by rank."""

    def __init__(self, stages: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # When each node's step has begun, by rank; at first, all of them.
        self._begun = clock()
        self._since: dict[int, float] = {}
        names = ["draft node", *(f"stage {i}" for i in range(1, stages + 1))]
        self.lines = {rank: (name, "starting") for rank, name in enumerate(names)}

    def __call__(self, report: Report) -> None:
        # The rank after the stages is a separate token source.
        name, _ = self.lines.get(report.rank, ("token source", ""))
        if isinstance(report, LoadingReport):
            self.lines[report.rank] = (name, f"loading {report.text}")
        elif isinstance(report, ReadyReport):
            self.lines[report.rank] = (name, READY)
        else:
            return
        self._since[report.rank] = self._clock()

    def pending(self) -> str:
        """The nodes that still load, with their steps; empty where all have loaded."""
        return ", ".join(f"{name} ({step})" for name, step in self.lines.values() if step != READY)

    def display(self) -> AbstractContextManager[object]:
        """Inside, a table of the steps on stderr; nothing where it is no terminal."""
        console = Console(stderr=True, soft_wrap=True)  # as of ``Waiting``
        if not console.is_terminal:
            return nullcontext()
        return Live(get_renderable=self.table, console=console, transient=True)

    def table(self) -> Table:
        """Steps with the seconds that each takes so far; of a node that is ready, those of all."""
        table = Table.grid(padding=(0, 2))
        for rank, (name, step) in self.lines.items():
            since = self._since.get(rank, self._begun)
            seconds = since - self._begun if step == READY else self._clock() - since
            table.add_row(name, step, f"{seconds:.0f} s")
        return table


def local_config(
    target: TargetTable,
    draft: DraftTable,
    stages: int,
    sessions: int,
    *,
    traced: bool = False,
    separate_source: bool = False,
    stage_pace: PaceTable | None = None,
    draft_pace: PaceTable | None = None,
    context: int = 0,
    llama: EngineOptions = DEFAULT_OPTIONS,
) -> Config:
    """``separate_source``: the token source has its own process. Ports are filled in at launch."""
    pace = dict.fromkeys(range(1, stages + 1), stage_pace) | {
        stages + 1 if separate_source else 0: draft_pace
    }
    return Config(
        cluster=ClusterTable(name=f"{STARTED}-{os.getpid()}", stages=stages),
        target=target,
        draft=draft,
        llama=llama,
        limits=LimitsTable(sessions=sessions, context=context, rejoin_seconds=REJOIN_SECONDS),
        trace=TRACED if traced else TraceTable(),
        source=SourceTable(host="127.0.0.1", port=1) if separate_source else None,
        pace={rank: table for rank, table in pace.items() if table is not None},
        node=tuple(NodeTable(rank=r, host="127.0.0.1", port=1) for r in range(stages + 1)),
    )


class LocalLauncher:
    """Starts a cluster's nodes on this machine, on free ports. ``forks``: they are forked from one
    process that has imported torch and transformers, which saves seconds per node."""

    def __init__(self, *, forks: bool = FORKS) -> None:
        self._forks = forks
        self._forking: ForkServerClient | None = None
        # By rank. They outlive a node, so that dialling a restarting node waits for it.
        self._sockets: dict[int, socket.socket] = {}

    def prepare(self, config: Config, folder: Path) -> Config:
        """Prepare to start nodes; files may go into ``folder``, which lives as long as the cluster.
        Returns the configuration with the nodes' addresses."""
        # Listening before any node starts: no dial is refused, no port can be taken in between.
        self._sockets = {node.rank: listen.loopback() for node in config.nodes}
        ports = {rank: sock.getsockname()[1] for rank, sock in self._sockets.items()}
        nodes = tuple(replace(node, port=ports[node.rank]) for node in config.node)
        source = config.source and replace(config.source, port=ports[config.stages + 1])
        self._config = replace(config, node=nodes, source=source)
        self._file = folder / FILE
        self._file.write_text(to_toml(self._config), encoding="utf-8")
        self._forking = ForkServerClient(self._file, folder) if self._forks else None
        return self._config

    async def start(self, rank: int, log: Path, *, again: Again) -> ChildNode:
        """Start a node that logs to ``log``; ``again``: as in ``ChildNode.start``."""
        role = role_of(rank, self._config.stages)
        return await ChildNode.start(
            rank, role, self._file, self._sockets[rank], log, forking=self._forking, again=again
        )

    async def close(self) -> None:
        """Clean up once all nodes have ended; also called where nothing was prepared."""
        if self._forking is not None:
            await self._forking.close()
        for sock in self._sockets.values():
            sock.close()


class SupervisedNode:
    """A node that is started again where it fails. ``start``: as ``ChildNode.start``, of this node;
    ``notify`` receives a line for each new start."""

    def __init__(
        self,
        start: Callable[[Again], Awaitable[ChildNode]],
        notify: Callable[[str], None],
        restarts: int = RESTARTS,
    ) -> None:
        self._start = start
        self._notify = notify
        self._budget = RestartBudget(restarts)
        self._stops = asyncio.Event()
        self.child: ChildNode | None = None

    async def start(self) -> None:
        """Start it for the first time. Raises as ``ChildNode.start``."""
        self.child = await self._start("")

    async def run(
        self, progress: ReportSink, may_restart: Callable[[], bool] = lambda: True
    ) -> AsyncSpecError:
        """Watch it, and start it again while it ``may_restart``, until it has ended for good: the
        error to report. A user's mistake would only repeat."""
        child, budget = self.child, self._budget
        assert child is not None
        while True:
            try:
                error = await child.watch(progress)
            finally:
                await child.stop()  # ends its remaining subprocesses
            if self._stops.is_set() or isinstance(error, UserError) or not may_restart():
                return error
            pause = budget.take(time.monotonic(), in_hand=child.in_hand)
            if pause is None:
                count = f"{len(budget.taken)} new starts within {PERIOD_SECONDS:g} s"
                return ClusterError(f"{error} after {count}")
            self._notify(f"{error}; it is started again{f' in {pause:g} s' if pause >= 1 else ''}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stops.wait(), pause)
            if self._stops.is_set():
                return error
            self.child = child = await self._start(child.end)
            if self._stops.is_set():
                await child.stop()

    async def stop(self) -> None:
        """End it; ``run`` returns then."""
        self._stops.set()
        if self.child is not None:
            await self.child.stop()


class LocalCluster:
    """``async with``: inside, every node has loaded and serves.

    ``progress`` receives the nodes' reports until then. ``scratch``: where the folder of temporary
    files is made (default: the system's). ``restarts``: how often each node is
    started again (``node.supervisor``), of which ``notify`` receives a line. The draft node keeps
    every committed path, so requests survive a stage's restart; clients keep theirs, so they
    survive the draft node's (``client.engine``).
    """

    def __init__(
        self,
        config: Config,
        progress: ReportSink,
        logs: Path | None = None,
        *,
        launch: LocalLauncher | None = None,
        scratch: Path | None = None,
        restarts: int = 0,
        notify: Callable[[str], None] = lambda line: None,
    ) -> None:
        if restarts:
            limits = replace(config.limits, rejoin_seconds=START_SECONDS)
            config = replace(config, limits=limits)
        # With the nodes' addresses once launched.
        self.config = config
        self._progress = progress
        self._logs = logs
        self._restarts = restarts
        self._notify = notify
        self._launch = launch or LocalLauncher()
        self._scratch = scratch
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._nodes: list[SupervisedNode] = []
        self._watches: list[asyncio.Task[AsyncSpecError]] = []
        self._serving = asyncio.Event()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the draft node."""
        draft = self.config.at(DRAFT)
        return draft.host, draft.port

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, by rank."""
        return tuple(child.process.pid for child in self._children)

    @property
    def _children(self) -> list[ChildNode]:
        return [node.child for node in self._nodes if node.child is not None]

    @property
    def guarantee(self) -> str:
        """ "bitwise" where every stage's self-test is, else "tolerance"."""
        verify = (c for c in self._children if c.role == "verify")
        guarantees = {child.ready.guarantee for child in verify if child.ready}
        return "bitwise" if guarantees == {"bitwise"} else "tolerance"

    async def __aenter__(self) -> LocalCluster:
        raise_file_limit()
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.gather(*(node.stop() for node in self._nodes))
        if self._watches:
            # A watch may be restarting a node, which it then stops.
            await asyncio.wait(self._watches, timeout=2 * STOP_SECONDS)
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await self._launch.close()
        if self._folder is not None:
            self._folder.cleanup()

    async def watch(self) -> AsyncSpecError:
        """Wait for the first node that ends and is not restarted; the error to report."""
        done, _ = await asyncio.wait(self._watches, return_when=asyncio.FIRST_COMPLETED)
        ended = [task.result() for task in done]
        # A user's mistake explains more than another node's lost peer.
        return next((e for e in ended if not isinstance(e, ClusterError)), ended[0])

    async def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="asyncspec-", dir=self._scratch)
        self.config = self._launch.prepare(self.config, Path(self._folder.name))
        try:
            async with asyncio.timeout(START_SECONDS):
                for node in self.config.nodes:
                    await self._keep(node.rank)
                await self._loaded()
        except TimeoutError:
            serving = {child.rank for child in self._children if child.ready}
            ranks = [node.rank for node in self.config.nodes if node.rank not in serving]
            late = ", ".join(name_of(rank, role_of(rank, self.config.stages)) for rank in ranks)
            raise ClusterError(f"{late} did not load within {START_SECONDS:g} s") from None

    async def _loaded(self) -> None:
        serving = asyncio.create_task(self._serving.wait())
        try:
            await asyncio.wait((serving, *self._watches), return_when=asyncio.FIRST_COMPLETED)
        finally:
            serving.cancel()
        if any(watch.done() for watch in self._watches):
            raise await self.watch()

    async def _keep(self, rank: int) -> None:
        """Start a node, and watch it from now on."""
        assert self._folder is not None
        log = (self._logs or Path(self._folder.name)) / f"rank-{rank}.log"

        def start(again: Again) -> Awaitable[ChildNode]:
            return self._launch.start(rank, log, again=again)

        node = SupervisedNode(start, self._notify, self._restarts)
        await node.start()
        self._nodes.append(node)
        # A failure before all nodes served would only repeat.
        watch = node.run(self._on_report, lambda: bool(self._restarts) and self._serving.is_set())
        self._watches.append(asyncio.create_task(watch))

    def _on_report(self, report: Report) -> None:
        if not self._serving.is_set():
            self._progress(report)
        children = self._children
        if len(children) == len(self.config.nodes) and all(child.ready for child in children):
            self._serving.set()
