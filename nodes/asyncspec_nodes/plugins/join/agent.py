"""A machine that has joined: it runs the stages that it is told to, and says how they are."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import chain, repeat
from pathlib import Path

import aiohttp
from msgspec import Struct

from asyncspec.core.errors import ClusterError, UserError
from asyncspec_nodes.node.processor import processor_here
from asyncspec_nodes.node.resources import free_memory, read_speed
from asyncspec_nodes.plugins.join import messages
from asyncspec_nodes.plugins.join.authority import Identity
from asyncspec_nodes.plugins.join.connection import Connector, NobodyThereError
from asyncspec_nodes.plugins.join.messages import (
    KEEP_SECONDS,
    Admitted,
    Alive,
    Dropped,
    Ended,
    FromMember,
    Leaving,
    Measured,
    Offer,
    Orders,
    Refused,
    ToMember,
)
from asyncspec_nodes.plugins.join.presence import PING_SECONDS, Presence
from asyncspec_nodes.plugins.join.probes import Probes
from asyncspec_nodes.plugins.join.stages import Stages, complete
from asyncspec_nodes.plugins.join.token import Token
from asyncspec_protocol.messages import PROTOCOL_VERSION

PAUSE_SECONDS = 1.0
SHORT_PAUSE_SECONDS = 0.1
"""After a connection that stood: the cluster counts a machine as gone two seconds later."""

MEASURE_SECONDS = (10.0, 60.0, 300.0)
"""Pauses before a machine measures its speed again, the last one over and over: the first time it
may have been busy with something else, which would leave it without layers for ever."""

FASTER = 1.1
"""Times the best speed so far that the cluster is told of."""

WAIT_SECONDS = 600.0
"""A machine looks for its cluster for so long, at its start and after a loss."""


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
        self._stages = Stages(
            sockets,
            folder,
            self._connector,
            options.target,
            same_machine=options.same_machine,
            tell=self._tell,
            say=say,
        )
        # The cluster has answered once.
        self._reached = False
        # Since when it looks for the cluster, and what ends its stages then.
        self._lost: float | None = None
        self._giving_up: asyncio.Task[None] | None = None
        self._probes = Probes(self._tell)
        # The cluster's run that it has joined.
        self._run = ""
        # Whether a message of the cluster is being followed, and others wait.
        self._is_busy = False
        # What it waits for before it is a member.
        self._pending = ""

    async def run(self) -> None:
        """Until cancelled, or the cluster ends. Raises ``UserError`` where it cannot take part,
        ``RefusedError`` after a failure, and ``ClusterError`` where no cluster answers for
        ``wait_seconds``."""
        measuring: asyncio.Task[None] | None = None
        if self._speed is None:
            # Before it is connected, as it is a busy machine meanwhile.
            self._pending = "its memory's speed"
            self._speed = await asyncio.to_thread(read_speed)
            measuring = asyncio.create_task(self._measure_again(self._speed))
        try:
            while True:
                problem = "the connection is lost"
                self._pending = "the cluster's answer"
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
            if measuring is not None:
                measuring.cancel()
            self._found()
            self._probes.follow(())
            await self._connector.close()
            await complete(asyncio.create_task(self._stages.close()))

    async def _measure_again(self, best: float) -> None:
        """Until cancelled: tell the cluster where this machine is faster than it has said."""
        for pause in chain(MEASURE_SECONDS, repeat(MEASURE_SECONDS[-1])):
            await asyncio.sleep(pause)
            speed = await asyncio.to_thread(read_speed)
            if speed > FASTER * best:
                self._speed = best = speed
                await self._tell(Measured(speed))

    def pending(self) -> str:
        """What has to happen before it takes part, or its stages serve; empty: nothing."""
        return self._pending or self._stages.pending()

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
        await self._stages.stop_all()
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
                    await self._stages.stop_all()
                self._run = run
                self._identity.receive(authority, certificate)
                self._found()
                self._pending = "its layers"
                self._say("joined")
                for outcome in self._stages.reports():
                    await self._tell(outcome)
            case Orders():
                self._identity.renew(message.certificate)
                self._probes.follow(message.probes)
                self._pending = ""
                await self._stages.follow(message)
            case Alive():
                pass
        return False

    async def _tell(self, message: FromMember) -> None:
        if self._channel is not None:
            with contextlib.suppress(OSError, RuntimeError, aiohttp.ClientError):
                await self._channel.send_str(messages.encode(message))
