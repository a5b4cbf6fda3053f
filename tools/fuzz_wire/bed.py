"""The nodes under attack, all in one event loop on loopback sockets, and a well-behaved client."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

from msgspec.structs import replace

from asyncspec.actor import mesh
from asyncspec.actor.link import Link, LinkOptions
from asyncspec.actor.mesh import Security
from asyncspec.core.errors import ClusterError
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.cluster.config import (
    ClusterTable,
    Config,
    DraftTable,
    LimitsTable,
    NodeTable,
    SourceTable,
    TargetTable,
)
from asyncspec_nodes.console.log_table import LogTable
from asyncspec_nodes.node import listen
from asyncspec_nodes.node.host import LocalEngine
from asyncspec_nodes.node.loading import load_node
from asyncspec_nodes.node.process import Node, assemble
from asyncspec_nodes.node.reports import Reporter
from asyncspec_nodes.reference.check import CheckRequest, check
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.framing import Frame, FrameReader
from asyncspec_protocol.ids import draft_rank, owner
from asyncspec_protocol.messages import Finished, Hello, Output, Submit

STAGES = 2
SOURCE = STAGES + 1
ANSWER_SECONDS = 300.0
"""For one answer of the well-behaved client, on a machine as busy as may be."""


class Found(Exception):
    """What no peer should be able to cause."""


class _CountingReader(FrameReader):
    """Counts frames, those that are refused as well."""

    frames = 0

    def next_frame(self) -> Frame | None:
        try:
            frame = super().next_frame()
        except RemoteProtocolError:
            self.frames += 1
            raise
        self.frames += frame is not None
        return frame


READ: Counter[int] = Counter()
"""Frames that nodes have read, by the peer's port: of links that are gone."""


class _CountingLink(Link):
    """A node's link."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._reader = _CountingReader(trusted=False, allocate=self._reader._allocate)
        self._port = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        peer = transport.get_extra_info("peername")
        self._port = peer[1] if peer else 0
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        assert isinstance(self._reader, _CountingReader)
        READ[self._port] = self._reader.frames
        super().connection_lost(exc)


def config_of(ports: dict[int, int], source: str) -> Config:
    """A toy cluster's file."""
    return Config(
        target=TargetTable(path="toy:attention=parent,context=4096"),
        node=tuple(NodeTable(rank, "127.0.0.1", ports[rank]) for rank in range(STAGES + 1)),
        source=SourceTable("127.0.0.1", ports[SOURCE]),
        cluster=ClusterTable(name="fuzzed"),
        draft=DraftTable(source=source),
        limits=LimitsTable(
            sessions=6,
            waiting=32,
            cache_mib=64,
            draft_mib=64,
            rejoin_seconds=2.0,
            silence_seconds=ANSWER_SECONDS,
        ),
        log=LogTable(level="error"),
    )


class Bed:
    """``async with``: a draft node, two stages and a token source; what peers must not disturb."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._nodes: dict[str, Node] = {}
        self.hellos: dict[int, Hello] = {}
        self.ports: dict[int, int] = {}
        self._mistake: BaseException | None = None

    async def __aenter__(self) -> Bed:
        asyncio.get_running_loop().set_exception_handler(self._failed)
        setattr(mesh, "Link", _CountingLink)  # noqa: B010
        self._stack.callback(setattr, mesh, "Link", Link)
        socks = {rank: listen.loopback() for rank in range(SOURCE + 1)}
        self.ports = {rank: sock.getsockname()[1] for rank, sock in socks.items()}
        self.config = config_of(self.ports, "toy:")
        for rank, sock in socks.items():
            self._start(self.config, rank, sock, str(rank))
        return self

    async def __aexit__(self, *exception: object) -> None:
        for name, node in self._nodes.items():
            if not self._tasks[name].done():
                node.runtime.stop()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._stack.aclose()

    def add_victim(self, ports: dict[int, int]) -> LocalEngine:
        """A draft node whose stages and token source are hostile, at ``ports``."""
        sock = listen.loopback()
        ports = {**ports, 0: sock.getsockname()[1]}
        self._start(config_of(ports, "toy:"), 0, sock, "victim")
        engine = self._nodes["victim"].engine
        assert engine is not None
        return engine

    def _start(self, config: Config, rank: int, sock: socket.socket, name: str) -> None:
        sock.setblocking(False)
        reporter = Reporter(rank, None, config.log)
        loaded = load_node(config, rank, reporter)
        self.hellos[rank] = loaded.me
        node = self._nodes[name] = assemble(config, loaded, sock, Security(), reporter, None)
        self._tasks[name] = asyncio.get_running_loop().create_task(node.runtime.run())

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception that nobody expected, as of a link's callback: it ends that link alone."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        if error is not None and not isinstance(error, OSError):
            self._mistake = self._mistake or error

    def check(self) -> None:
        """Raises ``Found`` where a node has ended, or has made a mistake."""
        if self._mistake is not None:
            raise Found(f"a node has made a mistake: {self._mistake!r}") from self._mistake
        for name, task in self._tasks.items():
            if task.done():
                error = task.exception()
                notes = "\n".join(getattr(error, "__notes__", ()))
                raise Found(f"node {name} has ended: {error!r}\n{notes}") from error

    @property
    def live_session(self) -> int:
        """One of the well-behaved client's, or of those that were."""
        state: Any = self._nodes["0"].runtime.state
        return int(next(iter(state.sessions), state.next_session - 1))

    async def settled(self) -> None:
        """Until nothing of the attackers is left. Raises ``Found`` after a while."""
        for _ in range(int(ANSWER_SECONDS * 10)):
            left = self._left()
            if not left:
                return
            self.check()
            await asyncio.sleep(0.1)
        raise Found(f"left behind: {left}")

    def _left(self) -> dict[str, object]:
        """Sessions and links that are not the cluster's own."""
        left: dict[str, object] = {}
        for rank in range(SOURCE + 1):
            node = self._nodes[str(rank)]
            state: Any = node.runtime.state
            foreign = [s for s in state.sessions if owner(s) != draft_rank(0) or rank == 0]
            cached = getattr(state, "cached_prompts", ())
            foreign += [s for s in cached if rank and owner(s) != draft_rank(0)]
            links = [link.rank for link in node.runtime.links.values() if link.rank > SOURCE]
            waiting = len(getattr(state, "queue", ())) + len(getattr(state, "backlog", ()))
            if foreign or links or waiting:
                left[f"rank {rank}"] = (foreign[:5], links[:5], waiting)
        return left


_QUESTIONS = tuple(
    Submit(0, prompt, length, seed, temperature, 0, 1.0, policy=policy, ignore_eos=True)
    for prompt, length, seed, temperature, policy in (
        ("Once upon a time", 40, 1, 0.0, ""),
        ("The quick brown fox jumps over the lazy dog. " * 3, 30, 2, 0.8, ""),
        ("Two and two", 25, 3, 0.0, "flowspec"),
        ("a", 20, 4, 1.0, "chain"),
        ("To be or not to be", 12, 5, 0.0, "autoregressive"),
    )
)


class Beside:
    """The well-behaved client: asks the same again and again, and must get the same."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self._expected: dict[int, tuple[int, ...]] = {}
        self.answers = 0
        self.longest = 0.0

    async def prepare(self) -> None:
        """Ask everything once, undisturbed, and compare it with the sequential decoder's."""
        async with asyncio.timeout(ANSWER_SECONDS):
            while True:
                client = await self._connect()
                try:
                    statuses = await client.nodes()
                finally:
                    await client.close()
                if len(statuses) == SOURCE + 1 and not any(one.missing for one in statuses):
                    break
                await asyncio.sleep(0.05)
        client = await self._connect()
        for number in range(len(_QUESTIONS)):
            self._expected[number] = await self._ask(client, number)
        await client.close()
        requests = [CheckRequest(_QUESTIONS[n], tokens) for n, tokens in self._expected.items()]
        for comparison in await check(self._bed.config, requests):
            if not comparison.equal:
                raise Found(f"before any attack an answer {comparison.sentence}")

    async def run(self) -> None:
        """Until cancelled. Raises ``Found`` for another answer."""
        loop = asyncio.get_running_loop()
        while True:
            client = await self._connect()
            try:
                for number in range(len(_QUESTIONS)):
                    began = loop.time()
                    tokens = await self._ask(client, number)
                    self.longest = max(self.longest, loop.time() - began)
                    if tokens != self._expected[number]:
                        same = self._expected[number]
                        raise Found(f"request {number} was answered by {tokens}, not {same}")
                    self.answers += 1
                    # Most of the time is the attackers'.
                    await asyncio.sleep(loop.time() - began)
            finally:
                await client.close()

    async def _connect(self) -> Client:
        # All share one event loop: where the machine is busy, it is silent for all of them.
        patient = LinkOptions(timeout_seconds=ANSWER_SECONDS)
        return await Client.connect("127.0.0.1", self._bed.ports[0], "fuzzed", options=patient)

    async def _ask(self, client: Client, number: int) -> tuple[int, ...]:
        tokens: list[int] = []
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                async for event in client.ask(replace(_QUESTIONS[number], request=number)):
                    if isinstance(event, Output):
                        tokens += event.token_ids
                    elif isinstance(event, Finished) and event.reason != "length":
                        raise Found(f"request {number} ended: {event.reason} {event.detail}")
        except ClusterError as error:
            raise Found(f"request {number}: {error}") from None
        except TimeoutError:
            raise Found(f"request {number} has no answer in {ANSWER_SECONDS:g} s") from None
        return tuple(tokens)
