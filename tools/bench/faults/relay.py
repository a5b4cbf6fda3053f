"""A local cluster whose links lead through this process, which can cut them without a FIN."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from msgspec.structs import replace

from asyncspec_nodes.cluster.config import Config
from asyncspec_nodes.cluster.file import to_toml
from asyncspec_nodes.local.cluster import FILE, LocalLauncher
from asyncspec_nodes.node import listen


class Side(asyncio.Protocol):
    """One of the two connections of a forwarded one."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: Side | None = None
        self.early: list[bytes] = []
        self.cut = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        for data in self.early:
            transport.write(data)

    def data_received(self, data: bytes) -> None:
        if self.cut or self.other is None:
            return
        if self.other.transport is None:
            self.other.early.append(data)
        else:
            self.other.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        # A cut connection's end is not passed on either.
        if not self.cut and self.other is not None and self.other.transport is not None:
            self.other.transport.close()


class RelayedLauncher(LocalLauncher):
    """``cut`` a node: what is written on its links from then on, either way, gets nowhere, and
    neither side is told. New links are forwarded."""

    def __init__(self) -> None:
        super().__init__()
        self._sides: dict[int, list[Side]] = {}
        self._relays: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def prepare(self, config: Config, folder: Path) -> Config:
        """See ``LocalLauncher``; the addresses are the relays'."""
        config = super().prepare(config, folder)
        loop = asyncio.get_running_loop()
        ports = {}
        for node in config.nodes:
            sock = listen.loopback()
            ports[node.rank] = sock.getsockname()[1]
            serving = loop.create_task(self._relay(node.rank, node.port, sock))
            self._tasks.add(serving)
        nodes = tuple(replace(node, port=ports[node.rank]) for node in config.node)
        source = config.source and replace(config.source, port=ports[config.stages + 1])
        self._config = replace(config, node=nodes, source=source)
        self._file.write_text(to_toml(self._config), encoding="utf-8")
        assert self._file.name == FILE
        return self._config

    def cut(self, rank: int) -> None:
        """The links that lead to a node, of whoever has dialled it."""
        for side in self._sides.get(rank, []):
            side.cut = True

    async def close(self) -> None:
        """See ``LocalLauncher``."""
        for relay in self._relays:
            relay.close()
        for side in (side for sides in self._sides.values() for side in sides):
            if side.transport is not None:
                side.transport.abort()
        await super().close()

    async def _relay(self, rank: int, port: int, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()

        def accept() -> Side:
            near, far = Side(), Side()
            near.other, far.other = far, near
            self._sides.setdefault(rank, []).extend((near, far))
            dialling = loop.create_task(dial(near, far))
            self._tasks.add(dialling)
            dialling.add_done_callback(self._tasks.discard)
            return near

        async def dial(near: Side, far: Side) -> None:
            try:
                await loop.create_connection(lambda: far, "127.0.0.1", port)
            except OSError:
                if near.transport is not None:
                    near.transport.abort()

        self._relays.append(await loop.create_server(accept, sock=sock))
