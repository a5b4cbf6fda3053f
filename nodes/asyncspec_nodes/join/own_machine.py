"""The machine that a cluster is started on, as one of its members."""

from __future__ import annotations

import socket
from pathlib import Path

from asyncspec_nodes.join.agent import Agent, AgentOptions
from asyncspec_nodes.join.discovery import near
from asyncspec_nodes.join.messages import PORTS
from asyncspec_nodes.join.token import Token
from asyncspec_nodes.node import listen


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
