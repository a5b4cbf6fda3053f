"""What runs on this machine: stages, as a member of a cluster that is started here or elsewhere,
and the draft node of one that is started here."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from asyncspec.core.errors import AsyncSpecError
from asyncspec_nodes.console.signals import on_termination
from asyncspec_nodes.console.waiting import show_waits
from asyncspec_nodes.local.children import Again, ChildNode
from asyncspec_nodes.local.cluster import SupervisedNode
from asyncspec_nodes.node import listen
from asyncspec_nodes.node.reports import ReportSink
from asyncspec_nodes.plugins.join.agent import Agent, AgentOptions
from asyncspec_nodes.plugins.join.connection import near
from asyncspec_nodes.plugins.join.folder import machine_folder
from asyncspec_nodes.plugins.join.messages import PORTS
from asyncspec_nodes.plugins.join.token import Token
from asyncspec_protocol.ids import DRAFT


def join_until_signal(
    token: Token, options: AgentOptions, address: tuple[str, int], say: Callable[[str], None]
) -> None:
    """Take part in the cluster of ``token`` until a termination signal, or its end. Stages listen
    on ``address`` and the ports after it; port 0: any. ``say`` receives a line for each event.
    Raises ``AsyncSpecError``."""
    host, port = address
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(machine_folder())
        sockets = []
        for number in range(PORTS):
            sock = listen.bind(host, port and port + number, whose="--listen")
            sockets.append(stack.enter_context(sock))

        async def work() -> None:
            stop = asyncio.Event()
            on_termination(stop.set)
            agent = Agent(token, options, sockets, folder, say)
            working = asyncio.create_task(agent.run())
            showing = asyncio.create_task(show_waits("waits", agent.pending))
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                await agent.leave()
            stopping.cancel()
            working.cancel()
            showing.cancel()
            await asyncio.gather(stopping, showing, return_exceptions=True)
            with contextlib.suppress(asyncio.CancelledError):
                await working

        asyncio.run(work())


class OwnMachine:
    """Its sockets, bound after the port ``address`` where machines join, and its agent, with the
    keys in ``folder``."""

    def __init__(
        self, token: Token, options: AgentOptions, address: tuple[str, int], folder: Path
    ) -> None:
        host, port = address
        folder.mkdir()
        self._sockets: list[socket.socket] = []
        for number in range(1, 1 + PORTS):
            whose = "--listen, or a port after it"
            self._sockets.append(listen.bind(host, port and port + number, whose=whose))
        # By the numbers of its ports: where the draft node reaches its stages. NAT need not lead
        # back to them.
        self.here = {
            number: (near(host), sock.getsockname()[1]) for number, sock in enumerate(self._sockets)
        }
        self._agent = Agent(token, options, self._sockets, folder, lambda line: None)

    @property
    def member(self) -> str:
        """Its id."""
        return self._agent.id

    async def run(self) -> None:
        """As ``Agent.run``."""
        try:
            await self._agent.run()
        finally:
            for sock in self._sockets:
                sock.close()


async def run_draft(
    file: Path, sock: socket.socket, report: ReportSink, say: Callable[[str], None]
) -> AsyncSpecError:
    """Keep the draft node of the cluster ``file`` running, beside which it logs; why it has ended
    for good."""

    def start(again: Again) -> Awaitable[ChildNode]:
        log = file.with_name("rank-0.log")
        return ChildNode.start(DRAFT, "draft", file, sock, log, again=again)

    node = SupervisedNode(start, say)
    await node.start()
    return await node.run(report)
