"""One node of a cluster: loads, serves until a signal, stops."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from asyncspec.actor.link import LinkOptions
from asyncspec.actor.mesh import Security
from asyncspec.actor.runtime import Runtime
from asyncspec.backend.base import CPU
from asyncspec.backend.registry import backend_of
from asyncspec.core.errors import ClusterError
from asyncspec.trace import records
from asyncspec.trace.collector import NodeTraceCollector
from asyncspec.trace.recorder import MOST, Recorder
from asyncspec.trace.records import machine_settings
from asyncspec_nodes.cluster.config import Config
from asyncspec_nodes.cluster.security import contexts
from asyncspec_nodes.console.signals import on_termination
from asyncspec_nodes.http.options import HttpSocket
from asyncspec_nodes.node.host import LocalEngine, NodeHost, WorkerThread
from asyncspec_nodes.node.in_hand import InHand, WatchedMachine
from asyncspec_nodes.node.inspector import Inspector
from asyncspec_nodes.node.loading import Loaded, after_end, load_node
from asyncspec_nodes.node.renewal import PeerAddresses, renew
from asyncspec_nodes.node.reports import ALIVE_SECONDS, ReadyReport, Reporter
from asyncspec_nodes.node.resources import freeze_objects
from asyncspec_nodes.node.supervisor import Again
from asyncspec_nodes.roles.tasks import TASKS
from asyncspec_nodes.serving.requests import describe_defaults
from asyncspec_nodes.serving.service import DRAINS, TextService
from asyncspec_nodes.serving.totals import Totals
from asyncspec_protocol.ids import DRAFT
from asyncspec_protocol.links import role_of
from asyncspec_protocol.messages import Status

if TYPE_CHECKING:
    from asyncspec_nodes.http.probes import Probes
    from asyncspec_nodes.http.server import HttpServer


async def serve(
    config: Config,
    rank: int,
    sock: socket.socket,
    reporter: Reporter,
    *,
    supervised: bool,
    http: HttpSocket | None = None,
    file: Path | None = None,
    again: Again = "",
) -> None:
    """Load, then serve until a signal or, where ``supervised``, the parent's end; with ``http``
    also HTTP: a draft node its clients, whose running answers are completed first, any other node
    its probes. ``file``: the cluster file, which says where peers are at any time.
    ``again``: how the process before has ended. Raises why the node failed."""
    security = contexts(config.security)
    stop = asyncio.Event()
    on_termination(stop.set)
    if supervised:
        _watch_parent(stop)
    async with AsyncExitStack() as stack:
        server = None
        if http is not None:
            # From the start, so that health checks find it alive while it loads.
            server = await stack.enter_async_context(_http(http, rank, config, reporter))
        loaded = await _load(config, rank, reporter, stop)
        loaded = after_end(loaded, again, at=time.time())
        for close in loaded.closing:
            stack.callback(close)
        if loaded.learning is not None:
            stack.callback(loaded.learning.close)
        node = assemble(config, loaded, sock, security, reporter, file)
        runtime = node.runtime
        running = asyncio.create_task(runtime.run())
        running.add_done_callback(lambda failed: stop.set())  # also while answers are completed
        if supervised:
            reporting = asyncio.create_task(_report_alive(reporter))
            stack.callback(reporting.cancel)
        renewing = asyncio.create_task(renew(security, runtime.check_certificates, reporter.log))
        stack.callback(renewing.cancel)
        if http is not None and server is not None:
            _report(server.service, node, http.options.models or (_model_name(config),))
            reporter.log.info(server.scheme, port=server.port)
        await stop.wait()
        if server is not None and not running.done():
            stop.clear()
            await server.drain(stop)
    if not running.done():
        reporter.log.info("stopping")
        runtime.stop()
        # Another signal, as where the device hangs.
        stop.clear()
        await stop.wait()
        if not running.done():
            runtime.stop()
    await running


async def _load(config: Config, rank: int, reporter: Reporter, stop: asyncio.Event) -> Loaded:
    """Load and report; ends the process where ``stop`` comes first."""
    started = time.monotonic()
    loading = asyncio.get_running_loop().run_in_executor(
        ThreadPoolExecutor(1, "loading"), load_node, config, rank, reporter
    )
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
    if stopping.done():
        # The loading thread cannot be interrupted, and nothing needs cleaning up.
        sys.stderr.flush()
        os._exit(0)
    stopping.cancel()
    loaded = await loading
    freeze_objects()
    seconds = round(time.monotonic() - started, 2)
    me, weights = loaded.me, loaded.weights
    reporter.serving(
        ReadyReport(
            *(rank, me.layers, me.dtype, loaded.guarantee, seconds, weights),
            *(loaded.threads, loaded.device),
        )
    )
    if loaded.serving is not None and (
        defaults := describe_defaults(loaded.serving.defaults.given)
    ):
        reporter.log.info("requests get what the target recommends", unless_they_say=defaults)
    if me.role == "verify" and config.find(DRAFT) is None:
        reporter.log.info("no draft node in the cluster file: those that come are served")
    return loaded


def _model_name(config: Config) -> str:
    return backend_of(config.target.path).model_name(config.target.path)


def _http(http: HttpSocket, rank: int, config: Config, reporter: Reporter) -> HttpServer:
    """A server whose service is loading: the whole one on a draft node, else probes."""
    from asyncspec_nodes.http.app import Service
    from asyncspec_nodes.http.probes import Probes
    from asyncspec_nodes.http.server import HttpServer

    role = role_of(rank, config.stages)
    kind = Service if role == "draft" else Probes
    whose = {"draft": "the draft node", "source": "the token source"}.get(role, f"stage {rank}")
    service = kind(http.options, lambda: f"{whose} ({reporter.step})", reporter.log)
    return HttpServer(service, http.sock, http.options.tls)


class Node(NamedTuple):
    """A node, what it says of itself, and on the draft node the engine of an HTTP service."""

    runtime: Runtime
    inspector: Inspector
    engine: LocalEngine | None


def _report(service: Probes, node: Node, models: Sequence[str]) -> None:
    """End the loading of an HTTP service; ``models``: the names of its model."""
    from asyncspec_nodes.http.app import Service

    if isinstance(service, Service) and node.engine is not None:
        service.serve(node.engine, *models)
        return

    async def statuses() -> tuple[Status, ...]:
        return (node.inspector.status(0),)

    service.report(statuses)


def assemble(
    config: Config,
    loaded: Loaded,
    sock: socket.socket,
    security: Security,
    reporter: Reporter,
    file: Path | None,
) -> Node:
    """A loaded node that listens on ``sock`` once its runtime runs."""
    host = NodeHost(reporter.log)

    def changed(some: bool) -> None:
        reporter.in_hand(some)
        if loaded.learning is not None:
            loaded.learning.in_hand(some)

    in_hand = InHand(changed)
    runtime = Runtime(
        WatchedMachine(loaded.machine, in_hand),
        loaded.machine.initial(),
        me=loaded.me,
        peers=PeerAddresses(config, file),
        sock=sock,
        run_job=loaded.run_job,
        abandon_job=loaded.abandon_job,
        tensors=loaded.tensors,
        host=host,
        tasks=TASKS,
        options=LinkOptions(
            timeout_seconds=config.limits.silence_seconds, packing_seconds=loaded.packing_seconds
        ),
        security=security,
        device_seconds=config.limits.device_seconds,
        on_processor=loaded.device == CPU and loaded.me.rank not in config.pace,
        prefixes=loaded.prefixes,
    )
    totals = Totals(time.monotonic) if loaded.me.role == "draft" else None
    model = _model_name(config)
    inspector = Inspector(
        *(runtime, loaded.me, model, loaded.serving, totals, loaded.draft),
        *(loaded.device, loaded.device_memory),
        machine=config.machine(loaded.me.rank),
        prefixes=loaded.prefixes,
    )
    if loaded.learning is not None:
        inspector.learning = loaded.learning.totals
    engine = None
    if loaded.tokenizer is not None and loaded.serving is not None:
        host.service = TextService(
            loaded.tokenizer,
            loaded.serving,
            runtime.feed,
            WorkerThread("reading"),
            WorkerThread("chats"),
            max_requests=config.limits.requests,
            totals=totals,
            reading=partial(in_hand.set, "reading"),
        )
        service = host.service
        inspector.refuses = lambda: DRAINS if service.draining else ""
        engine = LocalEngine(service, inspector)
    collector = NodeTraceCollector(
        runtime, partial(_recorder, config, loaded), always=config.trace.events > 0
    )
    if config.trace.text:
        host.record_text = collector.text
    return Node(runtime, inspector, engine)


def _recorder(config: Config, loaded: Loaded, whole: bool) -> Recorder:
    me = loaded.me
    node = records.NodeRecord(
        rank=me.rank,
        at=time.monotonic(),
        wall=time.time(),
        role=me.role,
        stages=me.stages,
        layers=me.layers,
        dtype=me.dtype,
        mode=me.mode,
        host=socket.gethostname(),
        pid=os.getpid(),
        config=machine_settings(loaded.machine.config),
        whole=whole,
    )
    return Recorder(node, max_lines=config.trace.events or MOST)


async def _report_alive(reporter: Reporter) -> None:
    while True:
        await asyncio.sleep(ALIVE_SECONDS)
        reporter.alive()


def _watch_parent(stop: asyncio.Event) -> None:
    """Set ``stop`` at the end of stdin: the parent holds its other end and never writes."""
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()

    def readable() -> None:
        if not os.read(descriptor, 4096):
            loop.remove_reader(descriptor)
            stop.set()

    try:
        loop.add_reader(descriptor, readable)
    except (OSError, PermissionError) as error:
        raise ClusterError(f"--supervised needs a pipe as stdin ({error})") from None
