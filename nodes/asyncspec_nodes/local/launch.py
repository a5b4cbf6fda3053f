"""How the nodes of a cluster become processes: here, or wherever else somebody makes room."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from asyncspec_nodes.cluster.config import to_toml
from asyncspec_nodes.cluster.config_tables import Config
from asyncspec_nodes.local.forking import SUPPORTED, Forking
from asyncspec_nodes.local.supervisor import Child
from asyncspec_nodes.node import listen
from asyncspec_protocol.handshake import role_of

FILE = "cluster.toml"


class Launch(Protocol):
    """What a ``LocalCluster`` starts its nodes by. It serves one cluster."""

    def prepare(self, config: Config, folder: Path) -> Config:
        """Make ready, before any node is started: cluster files, say, in ``folder``, which is there
        as long as the cluster. Gives the cluster with the addresses its nodes will have."""

    async def start(self, rank: int, log: Path, *, again: bool) -> Child:
        """Start a node that writes to ``log``; ``again``: it has ended, and its log goes on."""

    async def close(self) -> None:
        """All nodes have ended. Called also where nothing was prepared."""


class Loopback:
    """On this machine, as it is; ports are whatever is free. ``forks``: nodes are forked from one
    process, which imports torch and transformers for all of them (seconds for each of them)."""

    def __init__(self, *, forks: bool = SUPPORTED) -> None:
        self._forks = forks
        self._forking: Forking | None = None
        # By rank. They listen as long as the cluster lasts: whoever dials a node that is started
        # again waits for it.
        self._sockets: dict[int, socket.socket] = {}

    def prepare(self, config: Config, folder: Path) -> Config:
        """See ``Launch``."""
        # The sockets listen before anybody dials them, and no port is free for a moment between.
        self._sockets = {node.rank: listen.loopback() for node in config.nodes}
        ports = {rank: sock.getsockname()[1] for rank, sock in self._sockets.items()}
        self._config = _with_ports(config, ports)
        self._file = folder / FILE
        self._file.write_text(to_toml(self._config), encoding="utf-8")
        self._forking = Forking(self._file, folder) if self._forks else None
        return self._config

    async def start(self, rank: int, log: Path, *, again: bool) -> Child:
        """See ``Launch``."""
        role = role_of(rank, self._config.stages)
        return await Child.start(
            rank, role, self._file, self._sockets[rank], log, forking=self._forking, again=again
        )

    async def close(self) -> None:
        """See ``Launch``."""
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
