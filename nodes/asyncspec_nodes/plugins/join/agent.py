"""A machine that has joined: it runs the stages that it is told to, and says how they are."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
import tomlkit
from msgspec import Struct

from asyncspec.core.errors import AsyncSpecError, ClusterError, UserError
from asyncspec_nodes.local.children import Again, ChildNode
from asyncspec_nodes.local.cluster import SupervisedNode
from asyncspec_nodes.node.processor import processor_here
from asyncspec_nodes.node.reports import LoadingReport, ReadyReport, Report
from asyncspec_nodes.node.resources import free_memory, read_speed
from asyncspec_nodes.plugins.join import messages
from asyncspec_nodes.plugins.join.authority import Identity
from asyncspec_nodes.plugins.join.connection import Connector, NobodyThereError, near
from asyncspec_nodes.plugins.join.messages import (
    KEEP_SECONDS,
    Admitted,
    Alive,
    Dropped,
    Ended,
    Failed,
    FromMember,
    Leaving,
    Offer,
    Orders,
    Refused,
    Serving,
    Step,
    ToMember,
)
from asyncspec_nodes.plugins.join.parts import PartsSource
from asyncspec_nodes.plugins.join.presence import PING_SECONDS, Presence
from asyncspec_nodes.plugins.join.probes import Probes
from asyncspec_nodes.plugins.join.token import Token
from asyncspec_protocol.messages import PROTOCOL_VERSION

PAUSE_SECONDS = 1.0
SHORT_PAUSE_SECONDS = 0.1
"""After a connection that stood: the cluster counts a machine as gone two seconds later."""

WAIT_SECONDS = 600.0
"""A machine looks for its cluster for so long, at its start and after a loss."""

MAX_LINE = 1000


class RefusedError(ClusterError):
    """The cluster does not want this machine any more, for what its user cannot change."""


class AgentOptions(Struct, frozen=True):
    """What a user says of a machine."""

    name: str
    # Where others reach its stages: the address, empty: as it is seen; and the first port, 0: as
    # they listen.
    advertise: tuple[str, int] = ("", 0)
    # The address of the cluster in place of the token's; None: these, then mDNS.
    address: tuple[str, int] | None = None
    # The target on this machine; None: as the cluster names it, or fetched.
    target: str | None = None
    # Bytes, and bytes a second; None: measured.
    memory: int | None = None
    speed: float | None = None
    # The target's path is right as it is: on the machine that started the cluster.
    same_machine: bool = False
    # Bytes that are not for stages.
    reserved: int = 0
    # It looks for the cluster for so long.
    wait_seconds: float = WAIT_SECONDS


class _Stage(Struct, frozen=True):
    task: asyncio.Task[None]
    # The number of its port, its layers, and the number of all stages.
    how: tuple[int, tuple[int, int], int]


class Agent:
    """``folder``: for keys, files and logs; ``say`` receives a line for each event."""

    def __init__(
        self,
        token: Token,
        options: AgentOptions,
        sockets: list[socket.socket],
        folder: Path,
        say: Callable[[str], None],
    ) -> None:
        self._connector = Connector(token, options.address)
        self._options = options
        self._speed = options.speed
        self._sockets = sockets
        self._folder = folder
        self._say = say
        # New for every time that it joins with nothing.
        self.id = secrets.token_hex(8)
        self._identity = Identity(folder, options.name)
        self._channel: aiohttp.ClientWebSocketResponse | None = None
        self._orders: Orders | None = None
        # By rank: reports of stages that serve or have failed, also without a connection then.
        self._outcomes: dict[int, Serving | Failed] = {}
        # The cluster has answered once.
        self._reached = False
        # Since when it looks for the cluster, and what ends its stages then.
        self._lost: float | None = None
        self._giving_up: asyncio.Task[None] | None = None
        # By rank: what runs or loads, and where its target is; None: as the cluster names it.
        self._stages: dict[int, _Stage] = {}
        self._targets: dict[int, str | None] = {}
        self._probes = Probes(self._tell)
        # The cluster's run that it has joined.
        self._run = ""
        # Whether a message of the cluster is being followed, and others wait.
        self._is_busy = False
        # Whether it was said to be a spare.
        self._is_spare = False

    async def run(self) -> None:
        """Until cancelled, or the cluster ends. Raises ``UserError`` where it cannot take part,
        ``RefusedError`` after a failure, and ``ClusterError`` where no cluster answers for
        ``wait_seconds``."""
        if self._speed is None:
            # Before it is connected, as it is a busy machine meanwhile.
            self._speed = await asyncio.to_thread(read_speed)
        try:
            while True:
                problem = "the connection is lost"
                try:
                    async with (
                        aiohttp.ClientSession() as session,
                        await self._connector.connect(session) as channel,
                    ):
                        self._reached = True
                        await channel.send_str(messages.encode(self._offer()))
                        if await self._serve(channel):
                            self._say("the cluster has ended; the same command joins its next run")
                            return
                except NobodyThereError as error:
                    problem = str(error)
                except RefusedError:
                    raise
                except (aiohttp.ClientError, OSError, ClusterError) as error:
                    problem = f"the connection is lost ({error})" if self._reached else str(error)
                self._channel = None
                pause = SHORT_PAUSE_SECONDS if self._lost is None else PAUSE_SECONDS
                self._miss(problem)
                await asyncio.sleep(pause)
        finally:
            self._found()
            self._probes.follow(())
            await self._connector.close()
            await _complete(asyncio.create_task(self._stop_all()))

    def _miss(self, problem: str) -> None:
        """There is no cluster now. Raises ``ClusterError`` where it has been so for too long."""
        seconds = self._options.wait_seconds
        if self._lost is None:
            self._lost = time.monotonic()
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
            self._say(f"{problem}; trying again until {until} ({seconds:g} s)")
            self._giving_up = asyncio.create_task(self._give_up())
        elif time.monotonic() - self._lost > seconds:
            raise ClusterError(f"{problem}; it is so for {seconds:g} s")

    def _found(self) -> None:
        """It takes part, or ends."""
        self._lost = None
        if self._giving_up is not None:
            self._giving_up.cancel()

    async def _give_up(self) -> None:
        """Others get its stages after a while: then it is a new machine."""
        await asyncio.sleep(KEEP_SECONDS)
        if self._stages:
            self._say("stops its stages: others get them")
        await self._begin_anew()

    async def _begin_anew(self) -> None:
        await self._stop_all()
        self.id = secrets.token_hex(8)

    async def leave(self) -> None:
        """Tell the cluster, which then need not wait."""
        if self._channel is not None:
            with contextlib.suppress(OSError, RuntimeError, aiohttp.ClientError):
                await self._channel.send_str(messages.encode(Leaving()))

    def _offer(self) -> Offer:
        options = self._options
        return Offer(
            member=self.id,
            name=options.name,
            version=version("asyncspec"),
            protocol=PROTOCOL_VERSION,
            memory=max(0, free_memory() - options.reserved)
            if options.memory is None
            else options.memory,
            speed=self._speed or 1.0,
            host=options.advertise[0],
            ports=tuple(
                options.advertise[1] + number if options.advertise[1] else sock.getsockname()[1]
                for number, sock in enumerate(self._sockets)
            ),
            reached=self._connector.host,
            request=self._identity.request,
            processor=processor_here(),
        )

    async def _serve(self, channel: aiohttp.ClientWebSocketResponse) -> bool:
        """Until the connection ends; whether the cluster does. Raises ``UserError`` or
        ``RefusedError`` where it refuses."""
        self._channel = channel
        presence = Presence()
        pinging = asyncio.create_task(self._ping(channel, presence))
        try:
            async for raw in channel:
                if raw.type is not aiohttp.WSMsgType.TEXT:
                    break
                presence.received()
                self._is_busy = True
                if await self._receive(messages.decode(raw.data, ToMember)):  # type: ignore[arg-type]
                    return True
                self._is_busy = False
        finally:
            self._is_busy = False
            pinging.cancel()
        return False

    async def _ping(self, channel: aiohttp.ClientWebSocketResponse, presence: Presence) -> None:
        """Say that this machine is alive, until the cluster is gone."""
        while presence.state != "gone":
            await asyncio.sleep(PING_SECONDS)
            await self._tell(Alive())
            if self._is_busy:  # messages wait to be read
                presence.received()
            else:
                presence.tick()
        await channel.close()

    async def _receive(self, message: ToMember) -> bool:
        """Whether the cluster ends. Raises as ``_serve``, and ``ClusterError`` where it wants this
        machine to join anew."""
        match message:
            case Refused(text, user):
                raise UserError(text) if user else RefusedError(text)
            case Ended():
                return True
            case Dropped():
                await self._begin_anew()
                raise ClusterError("this machine was silent, and joins anew")
            case Admitted(authority, certificate, run):
                if self._run not in ("", run):
                    await self._stop_all()
                self._run = run
                self._identity.receive(authority, certificate)
                self._found()
                self._say("joined")
                for outcome in list(self._outcomes.values()):
                    await self._tell(outcome)
            case Orders():
                await self._follow(message)
            case Alive():
                pass
        return False

    async def _follow(self, orders: Orders) -> None:
        """Start and stop stages; what stays only learns the others' addresses."""
        self._orders = orders
        self._identity.renew(orders.certificate)
        self._probes.follow(orders.probes)
        nodes: Any = tomlkit.parse(orders.config)["node"]
        layers = {node["rank"]: tuple(node["layers"]) for node in nodes if node["rank"]}
        wanted = {
            rank: (port, layers[rank], len(layers))
            for rank, port in zip(orders.ranks, orders.ports, strict=True)
        }
        for rank in [rank for rank, stage in self._stages.items() if wanted.get(rank) != stage.how]:
            await self._stop(rank)
        for rank in self._stages:
            self._write(rank)
        if not wanted and not self._is_spare:
            self._say("a spare: it holds no layers until they are needed here")
        self._is_spare = not wanted
        for rank, how in wanted.items():
            if rank not in self._stages:
                task = asyncio.create_task(self._keep(rank, how[0], how[1], orders.version))
                self._stages[rank] = _Stage(task, how)

    async def _keep(self, rank: int, port: int, layers: tuple[int, int], version: int) -> None:
        """One stage: loaded, and started again where it fails."""
        self._say(f"runs stage {rank} (layers {layers[0]} to {layers[1] - 1})")
        log = self._folder / f"rank-{rank}.log"
        try:

            def say(line: str) -> None:
                self._say(line)
                self._report(rank, version, LoadingReport(rank, line))

            self._targets[rank] = await self._target(layers, say)
            file = self._write(rank)
            sock = self._sockets[port]

            def start(again: Again) -> Awaitable[ChildNode]:
                return ChildNode.start(rank, "verify", file, sock, log, again=again)

            node = SupervisedNode(start, self._say)
            await node.start()
            raise await node.run(lambda report: self._report(rank, version, report))
        # Of files here, and of orders or answers of another version, too.
        except (AsyncSpecError, OSError, ValueError) as error:
            self._say(str(error))
            text = " ".join(str(error).split())[:MAX_LINE]
            failed = Failed(version, rank, text, isinstance(error, UserError))
            self._outcomes[rank] = failed
            await self._tell(failed)

    async def _target(self, layers: tuple[int, int], say: Callable[[str], None]) -> str | None:
        """The target on this machine: its own, the Hub's (None: as the cluster names it), or parts
        of the one where the cluster was started. Raises ``AsyncSpecError``."""
        assert self._orders is not None
        if self._options.same_machine or self._options.target is not None:
            return self._options.target
        parsed: Any = tomlkit.parse(self._orders.config)
        if not Path(str(parsed["target"]["path"])).is_absolute():
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
        where they listen, which NAT need not lead back to."""
        assert self._orders is not None
        text: Any = tomlkit.parse(self._orders.config)
        if self._targets.get(rank) is not None:
            text["target"]["path"] = self._targets[rank]
        own = dict(zip(self._orders.ranks, self._orders.ports, strict=True))
        for node in text["node"]:
            if node["rank"] in own:
                host, node["port"] = self._sockets[own[node["rank"]]].getsockname()[:2]
                node["host"] = near(host)
            elif not node["rank"] and not self._options.same_machine:
                node["host"] = self._connector.host
        file = self._folder / f"rank-{rank}.toml"
        part = file.with_suffix(".part")
        part.write_text(tomlkit.dumps(text), encoding="utf-8")
        part.replace(file)
        return file

    def _report(self, rank: int, version: int, report: Report) -> None:
        if isinstance(report, LoadingReport):
            message: FromMember = Step(version, rank, report.text[:MAX_LINE])
        elif isinstance(report, ReadyReport):
            message = self._outcomes[rank] = Serving(version, rank, report.guarantee)
            self._say(f"stage {rank} serves")
        else:
            return
        task = asyncio.create_task(self._tell(message))
        task.add_done_callback(_retrieve)

    async def _tell(self, message: FromMember) -> None:
        if self._channel is not None:
            with contextlib.suppress(OSError, RuntimeError, aiohttp.ClientError):
                await self._channel.send_str(messages.encode(message))

    async def _stop(self, rank: int) -> None:
        stage = self._stages.pop(rank)
        self._outcomes.pop(rank, None)
        stage.task.cancel()
        await _complete(stage.task)

    async def _stop_all(self) -> None:
        for rank in list(self._stages):
            await self._stop(rank)


async def _complete(task: asyncio.Task[None]) -> None:
    """Wait for the end of a task that stops processes, also where this is cancelled meanwhile: they
    would outlive it."""
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True
    _retrieve(task)
    if cancelled:
        raise asyncio.CancelledError


def _retrieve(task: asyncio.Task[None]) -> None:
    """Retrieve a task's exception: asyncio would log it as never retrieved."""
    if not task.cancelled():
        task.exception()
