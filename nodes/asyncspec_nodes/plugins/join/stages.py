"""The stages of a machine that has joined: loaded, started again, and stopped, as it is told to.

They are forked from a process that has imported what they need, which on a busy board takes longer
than to load a stage.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import tomlkit
from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.errors import AsyncSpecError, ClusterError, UserError
from asyncspec.placement.model import span_text
from asyncspec_nodes.local.children import FORKS, Again, ChildNode, ForkServerClient
from asyncspec_nodes.local.cluster import SupervisedNode
from asyncspec_nodes.node.reports import LoadingReport, ReadyReport, Report
from asyncspec_nodes.node.resources import cores, threads_are_set
from asyncspec_nodes.plugins.join.connection import Connector, near
from asyncspec_nodes.plugins.join.messages import (
    Failed,
    FromMember,
    Orders,
    Prepared,
    Serving,
    Step,
)
from asyncspec_nodes.plugins.join.page_cache import PageCache
from asyncspec_nodes.plugins.join.parts import PartsSource

MAX_LINE = 1000

SPARE = "it gets layers once nobody asks, where that promises more, or those of a lost machine"
"""What is said of a machine where the cluster does not say more."""

NOWHERE = "127.1.1.{}", 1
"""An address, by rank, that refuses connections."""


class _Stage(Struct, frozen=True):
    task: asyncio.Task[None]
    # The number of its port, its layers, and the number of all stages.
    how: tuple[int, tuple[int, int], int]


class Stages:
    """``sockets``: where they listen, by the numbers of the machine's ports; ``folder``: for files
    and logs; ``connector``: the way to the cluster; ``target``: on this machine, None: as the
    cluster names it, or fetched; ``same_machine``: the cluster was started here; ``tell`` sends
    reports, ``say`` receives a line for each event."""

    def __init__(
        self,
        sockets: list[socket.socket],
        folder: Path,
        connector: Connector,
        target: str | None,
        *,
        same_machine: bool,
        tell: Callable[[FromMember], Awaitable[None]],
        say: Callable[[str], None],
    ) -> None:
        self._sockets = sockets
        self._folder = folder
        self._connector = connector
        self._target = target
        self._same_machine = same_machine
        self._tell = tell
        self._say = say
        self._orders: Orders | None = None
        # The cluster file in them, and by rank the numbers of its ports: of stages that it runs, or
        # loads for later.
        self._cluster: Any = {}
        self._ports: dict[int, int] = {}
        # By rank: reports of stages that serve or have failed, also without a connection then.
        self.outcomes: dict[int, Serving | Failed] = {}
        # By rank: what runs or loads, and where its target is; None: as the cluster names it.
        self._stages: dict[int, _Stage] = {}
        self._targets: dict[int, str | None] = {}
        # By rank: the version of the orders for it, 0: it is loaded for later.
        self._versions: dict[int, int] = {}
        self._forking: ForkServerClient | None = None
        # Ends once that process has imported everything.
        self._importing: asyncio.Task[None] | None = None
        self._prepared = False
        self._cache = PageCache(partial(self._find_target, say=lambda line: None))
        # What was said of the machine as a spare; empty: it is none.
        self._spare = ""
        # By rank: how far stages are that load.
        self._loading: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._stages)

    async def follow(self, orders: Orders) -> None:
        """Start and stop stages; what stays only learns the others' addresses. Raises
        ``ClusterError`` for orders of another version."""
        self._read(orders)
        nodes = self._cluster["node"]
        layers = {node["rank"]: tuple(node["layers"]) for node in nodes if node["rank"]}
        wanted = {rank: (port, layers[rank], len(layers)) for rank, port in self._ports.items()}
        for rank in [rank for rank, stage in self._stages.items() if wanted.get(rank) != stage.how]:
            await self._stop(rank)
        spare = "" if orders.ranks else orders.spare or self._spare or SPARE
        if spare not in ("", self._spare):
            self._say(f"a spare: {spare}")
        self._spare = spare
        with contextlib.suppress(OSError):  # then stages are started without it
            await self._prepare_forks()
        for rank in self._stages:
            self._write(rank)
        for rank in wanted:
            was, now = self._versions.get(rank), orders.version if rank in orders.ranks else 0
            self._versions[rank] = now
            if now and was == 0 and rank in self._stages:
                await self._promote(rank)
        for rank, how in wanted.items():
            if rank not in self._stages:
                self._stages[rank] = _Stage(asyncio.create_task(self._keep(rank, *how[:2])), how)
        self._cache.follow(orders.cached)

    def _read(self, orders: Orders) -> None:
        try:
            self._cluster = tomlkit.parse(orders.config).unwrap()
        except ValueError as error:
            raise ClusterError(f"orders of another version came ({error}); upgrade it") from None
        self._orders = orders
        self._ports = dict(zip(orders.ranks, orders.ports, strict=True))
        self._ports |= zip(orders.standby, orders.standby_ports, strict=True)

    def pending(self) -> str:
        """The stages that load, and how far they are; empty where none does."""
        return ", ".join(f"stage {rank} ({step})" for rank, step in self._loading.items())

    def reports(self) -> list[FromMember]:
        """What the cluster is to know, also one that has lost its connection."""
        return [*self.outcomes.values(), *([Prepared()] if self._prepared else [])]

    async def stop_all(self) -> None:
        """The machine takes no part now."""
        self._cache.follow(())
        for rank in list(self._stages):
            await self._stop(rank)

    async def close(self) -> None:
        """Stop everything, for good."""
        await self.stop_all()
        if self._importing is not None:
            self._importing.cancel()
        if self._forking is not None:
            await self._forking.close()

    async def _promote(self, rank: int) -> None:
        """What was loaded for later is needed now; where that has failed it is tried again."""
        outcome = self.outcomes.get(rank)
        if isinstance(outcome, Failed):
            await self._stop(rank)
            return
        self._say(f"runs stage {rank}, which it has loaded for that")
        if outcome is not None:
            outcome = self.outcomes[rank] = replace(outcome, version=self._versions[rank])
            await self._tell(outcome)

    async def _prepare_forks(self) -> None:
        """Import what stages need before they are needed. Raises ``OSError``."""
        assert self._orders is not None
        if self._forking is not None:
            return
        if not FORKS:
            # Each stage imports for itself, here as anywhere.
            await self._set_prepared()
            return
        file = self._folder / "orders.toml"
        file.write_text(self._orders.config, encoding="utf-8")
        # The cores are shared by the stages that are here at first.
        threads = None if threads_are_set() else max(1, cores() // max(1, len(self._orders.ranks)))
        self._forking = ForkServerClient(file, self._folder, threads)
        log = self._folder / "forks.log"
        await self._forking.prepare(log)
        self._importing = asyncio.create_task(self._imported(self._forking, log))
        self._importing.add_done_callback(retrieve)

    async def _imported(self, forking: ForkServerClient, log: Path) -> None:
        await forking.imported(log)
        await self._set_prepared()

    async def _set_prepared(self) -> None:
        if not self._prepared:
            self._prepared = True
            await self._tell(Prepared())

    async def _keep(self, rank: int, port: int, layers: tuple[int, int]) -> None:
        """One stage: loaded, and started again where it fails."""
        verb = "runs" if self._versions[rank] else "loads, in case it is needed,"
        self._say(f"{verb} stage {rank} ({span_text(layers)})")
        self._loading[rank] = "starting"
        log = self._folder / f"rank-{rank}.log"
        try:

            def say(line: str) -> None:
                self._say(line)
                self._report(rank, LoadingReport(rank, line))

            self._targets[rank] = await self._find_target(layers, say)
            file = self._write(rank)
            sock = self._sockets[port]

            def start(again: Again) -> Awaitable[ChildNode]:
                forking = self._forking
                return ChildNode.start(
                    rank, "verify", file, sock, log, forking=forking, again=again
                )

            node = SupervisedNode(start, self._say)
            await node.start()
            raise await node.run(lambda report: self._report(rank, report))
        # Files here raise these, and so do orders or answers of another version.
        except (AsyncSpecError, OSError, ValueError) as error:
            self._loading.pop(rank, None)
            self._say(str(error))
            text = " ".join(str(error).split())[:MAX_LINE]
            failed = Failed(self._versions[rank], rank, text, isinstance(error, UserError))
            self.outcomes[rank] = failed
            await self._tell(failed)

    async def _find_target(self, layers: tuple[int, int], say: Callable[[str], None]) -> str | None:
        """The target on this machine: its own, the Hub's (None: as the cluster names it), or parts
        of the one where the cluster was started. Raises ``AsyncSpecError``."""
        if self._same_machine or self._target is not None:
            return self._target
        if not Path(self._cluster["target"]["path"]).is_absolute():
            return None
        async with aiohttp.ClientSession(headers=self._connector.headers) as session:
            source = PartsSource(session, self._connector.base, self._connector.fingerprint)
            folder = await asyncio.to_thread(self._model_folder)
            return str(await source.fetch(layers, folder, say))

    def _model_folder(self) -> Path:
        folder = self._folder / "model"
        folder.mkdir(exist_ok=True)
        return folder

    def _write(self, rank: int) -> Path:
        """The cluster file of a stage: with the target's place on this machine, and its own nodes
        where they listen, which NAT need not lead back to. One that is loaded for later reaches
        nobody: the stage whose place it may take may live."""
        assert self._orders is not None
        cluster = copy.deepcopy(self._cluster)
        if self._targets.get(rank) is not None:
            cluster["target"]["path"] = self._targets[rank]
        is_standby = rank in self._orders.standby
        here = (rank,) if is_standby else self._orders.ranks
        for node in cluster["node"]:
            if is_standby and node["rank"] != rank:
                node["host"], node["port"] = NOWHERE[0].format(node["rank"]), NOWHERE[1]
            elif node["rank"] in here:
                number = self._ports[node["rank"]]
                host, node["port"] = self._sockets[number].getsockname()[:2]
                node["host"] = near(host)
            elif not node["rank"] and not self._same_machine:
                node["host"] = self._connector.host
        file = self._folder / f"rank-{rank}.toml"
        part = file.with_suffix(".part")
        part.write_text(tomlkit.dumps(cluster), encoding="utf-8")
        part.replace(file)
        return file

    def _report(self, rank: int, report: Report) -> None:
        version = self._versions[rank]
        if isinstance(report, LoadingReport):
            self._loading[rank] = report.text
            message: FromMember = Step(version, rank, report.text[:MAX_LINE])
        elif isinstance(report, ReadyReport):
            self._loading.pop(rank, None)
            message = self.outcomes[rank] = Serving(version, rank, report.guarantee)
            self._say(f"stage {rank} {'serves' if version else 'is loaded'}")
        else:
            return
        task = asyncio.ensure_future(self._tell(message))
        task.add_done_callback(retrieve)

    async def _stop(self, rank: int) -> None:
        stage = self._stages.pop(rank)
        self.outcomes.pop(rank, None)
        stage.task.cancel()
        await complete(stage.task)
        self._loading.pop(rank, None)


async def complete(task: asyncio.Task[None]) -> None:
    """Wait for the end of a task that stops processes, also where this is cancelled meanwhile: they
    would outlive it."""
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True
    retrieve(task)
    if cancelled:
        raise asyncio.CancelledError


def retrieve(task: asyncio.Future[None]) -> None:
    """Retrieve a task's exception: asyncio would log it as never retrieved."""
    if not task.cancelled():
        task.exception()
