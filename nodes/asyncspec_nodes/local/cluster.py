"""A whole cluster on this machine: one draft node and N stages as processes, linked over TCP."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from msgspec.structs import replace

from asyncspec.errors import AsyncSpecError, ClusterError
from asyncspec_nodes.cluster.config_tables import Config
from asyncspec_nodes.local.launch import Launch, Loopback
from asyncspec_nodes.local.processes import STOP_SECONDS
from asyncspec_nodes.local.restarts import Allowance, Restarts
from asyncspec_nodes.local.supervisor import Child, name_of
from asyncspec_nodes.node.reports import Report
from asyncspec_protocol.handshake import role_of
from asyncspec_protocol.ids import DRAFT

START_SECONDS = 600.0
"""A cluster that has not loaded its models by then is given up."""

NEVER = Restarts()
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
        launch: Launch | None = None,
        scratch: Path | None = None,
        restarts: Restarts = NEVER,
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
        self._launch = launch or Loopback()
        self._scratch = scratch
        self._stopping = False
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

    async def _child(self, place: int, *, again: bool = False) -> Child:
        assert self._folder is not None
        rank = self.config.nodes[place].rank
        log = (self._logs or Path(self._folder.name)) / f"rank-{rank}.log"
        return await self._launch.start(rank, log, again=again)

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
