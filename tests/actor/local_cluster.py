"""A whole toy cluster on loopback sockets, in one event loop."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from asyncspec.actor.link import Link, LinkOptions
from asyncspec.actor.routing import Host, Senders
from asyncspec.actor.runtime import Runtime
from asyncspec.core.machine import Emit, Finish, Machine, Request, Submitted
from asyncspec.core.tensors import Tensors
from asyncspec.plugins.toy.model import ToyModel, ToyStage
from asyncspec.plugins.toy.source import ToyEagle, ToySource
from asyncspec.trace.collector import NodeTraceCollector
from asyncspec.trace.recorder import Recorder
from asyncspec.trace.records import NodeRecord, machine_settings
from asyncspec_nodes.node.sources import PassedOn
from asyncspec_nodes.roles.draft.config import DraftConfig
from asyncspec_nodes.roles.draft.machine import DraftMachine
from asyncspec_nodes.roles.tasks import TASKS
from asyncspec_nodes.roles.verify.config import VerifyConfig
from asyncspec_nodes.roles.verify.machine import VerifyMachine
from asyncspec_protocol.ids import Rank, SessionId, draft_rank, first_session, is_draft
from asyncspec_protocol.links import role_of
from asyncspec_protocol.messages import PROTOCOL_VERSION, Cancel, Hello, Submit
from cluster import LIFE

QUICK = LinkOptions(
    heartbeat_seconds=0.05,
    timeout_seconds=2.0,
    hello_seconds=2.0,
    redial_seconds=(0.01, 0.05),
    dial_seconds=0.5,
)


def bound() -> socket.socket:
    """A listening socket on a port of its own."""
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    return sock


def hello(rank: int, stages: int, **changes: Any) -> Hello:
    """What a toy node says of itself."""
    role = role_of(rank, stages)
    layers = (4 * (rank - 1) // stages, 4 * rank // stages) if role == "verify" else (0, 0)
    fields: dict[str, Any] = {
        "protocol": PROTOCOL_VERSION,
        "cluster": "toy",
        "rank": Rank(rank),
        "role": role,
        "stages": stages,
        "layers": layers,
        "dtype": "uint64",
        "fingerprint": "toy",
        "mode": "exact",
    }
    return Hello(**{**fields, **changes})


class RecordingHost(Host):
    """Keeps what a node reports to the process around it, and wakes the tests that wait for it."""

    senders: ClassVar[Senders] = {Submit: ("client",), Cancel: ("client",)}

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, asyncio.Future[Finish]] = {}
        self.changes: asyncio.Queue[tuple[int, bool, str]] = asyncio.Queue()
        self.asked: asyncio.Queue[Submit | Cancel] = asyncio.Queue()
        self.gone: asyncio.Queue[Link] = asyncio.Queue()
        self._news = asyncio.Event()

    async def has(self, request: int, count: int) -> None:
        """Wait until a request has so many tokens."""
        while len(self.tokens.get(request, ())) < count:
            self._news.clear()
            await self._news.wait()

    def end(self, request: int) -> asyncio.Future[Finish]:
        return self.ends.setdefault(request, asyncio.get_running_loop().create_future())

    def emit(self, effect: Emit) -> None:
        self.tokens.setdefault(effect.request, []).extend(effect.tokens)
        self._news.set()

    def finish(self, effect: Finish) -> None:
        self.end(effect.request).set_result(effect)

    def received(self, link: Link, message: Any, data: memoryview | None) -> None:
        self.asked.put_nowait(message)

    def joined(self, link: Link) -> None:
        if link.rank >= 0:
            self.changes.put_nowait((link.rank, True, ""))

    def lost(self, link: Link, reason: str) -> None:
        if link.rank >= 0:
            self.refused(link.rank, reason)
        else:
            self.gone.put_nowait(link)

    def refused(self, rank: Rank, reason: str) -> None:
        self.changes.put_nowait((rank, False, reason))


class LocalCluster:
    """``async with LocalCluster(stages) as cluster``: nodes that can be killed and started."""

    def __init__(
        self,
        stages: int,
        model: ToyModel | None = None,
        *,
        traced: bool | None = None,
        features: tuple[int, ...] = (),
        drafts: int = 1,
        device_seconds: float = 60.0,
        devices: Mapping[int, Callable[[Any], Any]] | None = None,
    ) -> None:
        """``devices``: what the first device of a node is made into. ``traced``: record always;
        False: only what is asked for; None: never. ``features``:
        what the token source reads of the target."""
        self.stages = stages
        self.drafts = [draft_rank(number) for number in range(drafts)]
        self.features = features
        self.traced = traced
        self._device_seconds = device_seconds
        self._devices = dict(devices or {})
        self.collectors: dict[int, NodeTraceCollector] = {}
        self.model = model or ToyModel()
        self.shells: dict[int, RecordingHost] = {}
        self.nodes: dict[int, Runtime] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.backends: dict[int, ToyStage] = {}
        self.ports: dict[Rank, tuple[str, int]] = {}
        self._socks: dict[int, socket.socket] = {}
        # By rank: what a node that is started says of itself otherwise.
        self.changes: dict[int, dict[str, Any]] = {}
        # Session ids grow also over restarts.
        self._begun = 0

    async def __aenter__(self) -> LocalCluster:
        ranks = [*self.drafts, *range(1, self.stages + 1)]
        for rank in ranks:
            self._socks[rank] = bound()
            self.ports[Rank(rank)] = self._socks[rank].getsockname()
        for rank in ranks:
            self.start(rank)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for rank in list(self.nodes):
            await self.stop(rank)

    def start(self, rank: int) -> None:
        """Start a node, or start it again on the same port."""
        sock = self._socks.pop(rank, None)
        if sock is None:
            sock = socket.create_server(self.ports[Rank(rank)])
            sock.setblocking(False)
        machine: DraftMachine | VerifyMachine
        run: Any
        tensors: Tensors | None = None
        if is_draft(rank):
            machine = DraftMachine(
                DraftConfig(
                    stages=self.stages,
                    rejoin_seconds=20.0,
                    features=self.features,
                    first_session=SessionId(first_session(Rank(rank)) + self._begun),
                )
            )
            self._begun += LIFE
            run, tensors = ToySource(self.model).run, PassedOn(None)
            if self.features:
                tensors = eagle = ToyEagle(self.model, self.features)
                run = eagle.run
        else:
            first, end = hello(rank, self.stages).layers
            machine = VerifyMachine(
                VerifyConfig(
                    Rank(rank),
                    self.stages,
                    first_layer=first,
                    end_layer=end,
                    layers=self.model.layers,
                )
            )
            tensors = self.backends[rank] = ToyStage(self.model, first, end)
            run = self.backends[rank].run
        shell = self.shell(rank)
        role: Machine[Any] = machine
        self.nodes[rank] = Runtime(
            role,
            machine.initial(),
            me=hello(rank, self.stages, **self.changes.get(rank, {})),
            peers=self.ports,
            sock=sock,
            run_job=self._devices.pop(rank, lambda run: run)(run),
            abandon_job=lambda job: None,
            tensors=tensors,
            host=shell,
            tasks=TASKS,
            options=QUICK,
            device_seconds=self._device_seconds,
        )
        if self.traced is not None:
            self.collectors[rank] = self._collector(rank, machine_settings(machine.config))
        self.tasks[rank] = asyncio.get_running_loop().create_task(self.nodes[rank].run())

    def shell(self, rank: int) -> Host:
        """The process around a node."""
        self.shells[rank] = RecordingHost()
        return self.shells[rank]

    def _collector(self, rank: int, config: dict[str, Any]) -> NodeTraceCollector:
        def recorder(whole: bool) -> Recorder:
            role = role_of(rank, self.stages)
            at = time.monotonic()
            return Recorder(NodeRecord(rank, at, at, role, self.stages, config=config, whole=whole))

        return NodeTraceCollector(self.nodes[rank], recorder, always=bool(self.traced))

    async def stop(self, rank: int) -> None:
        """Stop a node; its task must end cleanly."""
        node = self.nodes.pop(rank)
        await asyncio.sleep(0)
        if rank in self.collectors:
            self.collectors.pop(rank).close()
        node.stop()
        await self.tasks.pop(rank)

    async def ask(self, request: Request, of: int = 0) -> Finish:
        """Submit a request to a draft node and wait for its end."""
        await asyncio.sleep(0)  # let the nodes' tasks begin
        self.nodes[of].feed(Submitted(request))
        return await self.shells[of].end(request.request)
