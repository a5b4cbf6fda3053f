"""One node of a cluster, from its socket to its end."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncspec.actor.link import Link, LinkOptions
from asyncspec.actor.mesh import Security
from asyncspec.actor.runtime import Runtime
from asyncspec.backend.registry import backend_of
from asyncspec.core.errors import ClusterError
from asyncspec.core.machine import Emit, Finish, Machine
from asyncspec.trace import records
from asyncspec.trace.collector import NodeTraceCollector
from asyncspec.trace.recorder import MOST, Recorder
from asyncspec_nodes.cluster.config import Config
from asyncspec_nodes.cluster.security import contexts
from asyncspec_nodes.console.signals import on_termination
from asyncspec_nodes.http.options import HttpSocket
from asyncspec_nodes.node.engine import LocalEngine
from asyncspec_nodes.node.inspector import Inspector, node_counts
from asyncspec_nodes.node.loading import Loaded, load_node
from asyncspec_nodes.node.reports import ReadyReport, Reporter
from asyncspec_nodes.node.worker_thread import WorkerThread
from asyncspec_nodes.roles.tasks import TASKS
from asyncspec_nodes.serving.requests import describe_defaults
from asyncspec_nodes.serving.service import TextService
from asyncspec_nodes.simulation.replay import settings
from asyncspec_protocol.ids import DRAFT, Rank
from asyncspec_protocol.messages import Cancel, Submit

if TYPE_CHECKING:
    from asyncspec_nodes.http.server import HttpServer


class NodeShell:
    """The process around a runtime: log lines, and on the draft node the text service."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self.service: TextService | None = None
        # Where the text of answers is told, if anywhere.
        self.tell: Callable[[int, tuple[int, ...], str], None] | None = None

    def emit(self, effect: Emit) -> None:
        """See ``HostCallbacks``."""
        if self.service is not None:
            piece = self.service.emit(effect)
            if self.tell is not None:
                self.tell(effect.request, effect.tokens, piece)

    def finish(self, effect: Finish) -> None:
        """See ``HostCallbacks``. Numbers are logged, never text."""
        stats = effect.stats
        self._log.info(
            "finished",
            session=int(effect.session),
            reason=effect.reason,
            detail=effect.detail,
            prompt_tokens=stats.get("prompt_tokens"),
            new_tokens=stats.get("new_tokens"),
        )
        if self.service is not None:
            rest = self.service.finish(effect)
            if self.tell is not None and rest:
                self.tell(effect.request, (), rest)

    def client(self, link: Link, message: Submit | Cancel) -> None:
        """See ``HostCallbacks``."""
        if self.service is not None:
            self.service.client(link, message)

    def client_gone(self, link: Link) -> None:
        """See ``HostCallbacks``."""
        if self.service is not None:
            self.service.client_gone(link)

    def changed(self, peer: Rank, up: bool, reason: str) -> None:
        """See ``HostCallbacks``."""
        if up:
            self._log.info("linked", peer=int(peer))
        else:
            self._log.warning("unlinked", peer=int(peer), why=reason)


async def serve(
    config: Config,
    rank: int,
    sock: socket.socket,
    reporter: Reporter,
    *,
    supervised: bool,
    http: HttpSocket | None = None,
) -> None:
    """Load, then serve until a signal (or the parent's end). ``http``: to HTTP clients as well,
    whose answers come to their end first. Raises what went wrong."""
    security = contexts(config.security)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    on_termination(stop.set)
    if supervised:
        _watch_parent(loop, stop)
    async with AsyncExitStack() as stack:
        server = None
        if http is not None:
            # From the start: whoever watches this process sees that it is alive while it loads.
            server = await stack.enter_async_context(_http(http, reporter))
        loaded = await _load(config, rank, reporter, stop)
        runtime, engine = _runtime(config, loaded, sock, security, reporter)
        running = asyncio.create_task(runtime.run())
        if server is not None and engine is not None:
            model = http.options.model if http is not None else None
            server.service.serve(engine, model or _model_name(config))
            reporter.log.info(server.scheme, port=server.port)
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if server is not None and not running.done():
            stop.clear()
            await server.drain(stop)
    if not running.done():
        reporter.log.info("stopping")
        runtime.stop()
    await running


async def _load(config: Config, rank: int, reporter: Reporter, stop: asyncio.Event) -> Loaded:
    """What the node serves with; what there is to say of it is reported."""
    started, loop = time.monotonic(), asyncio.get_running_loop()
    loaded = await _first(stop, _in_thread(loop, lambda: load_node(config, rank, reporter)))
    # What is loaded stays: nobody has to look for garbage among it again, which takes .3 s.
    gc.collect()
    gc.freeze()
    seconds = round(time.monotonic() - started, 2)
    me, weights = loaded.me, loaded.weights
    reporter.serving(
        ReadyReport(rank, me.layers, me.dtype, loaded.guarantee, seconds, weights, loaded.threads)
    )
    if loaded.rules is not None and (defaults := describe_defaults(loaded.rules.defaults.said)):
        reporter.log.info("requests get what the target recommends", unless_they_say=defaults)
    if me.role == "verify" and config.find(DRAFT) is None:
        reporter.log.info("no draft node in the cluster file: those that come are served")
    return loaded


def _model_name(config: Config) -> str:
    return backend_of(config.target.path).model_name(config.target.path)


def _http(http: HttpSocket, reporter: Reporter) -> HttpServer:
    """An HTTP service that is loading."""
    from asyncspec_nodes.http.app import Service
    from asyncspec_nodes.http.server import HttpServer

    options = http.options
    service = Service(
        keys=options.keys,
        hosts=options.hosts,
        origins=options.origins,
        limits=options.limits,
        pending=lambda: f"the draft node ({reporter.step})",
    )
    return HttpServer(service, http.sock, options.tls)


def _runtime(
    config: Config, loaded: Loaded, sock: socket.socket, security: Security, reporter: Reporter
) -> tuple[Runtime[Any], LocalEngine | None]:
    """The node, and on the draft node what an HTTP service in this process stands on."""
    shell = NodeShell(reporter.log)
    machine: Machine[Any] = loaded.machine
    runtime: Runtime[Any] = Runtime(
        machine,
        loaded.initial,
        me=loaded.me,
        peers={Rank(n.rank): (n.host, n.port) for n in config.nodes},
        sock=sock,
        run_job=loaded.run_job,
        abandon_job=loaded.abandon_job,
        tensors=loaded.tensors,
        host=shell,
        tasks=TASKS,
        options=LinkOptions(
            timeout_seconds=config.limits.silence_seconds, packing_seconds=loaded.packing_seconds
        ),
        security=security,
        device_seconds=config.limits.device_seconds,
    )
    inspector = Inspector(
        runtime, loaded.me, node_counts, model=_model_name(config), rules=loaded.rules
    )
    engine = None
    if loaded.codec is not None and loaded.rules is not None:
        aside, most = WorkerThread("reading"), config.limits.requests
        shell.service = TextService(loaded.codec, loaded.rules, runtime.feed, aside, most=most)
        engine = LocalEngine(shell.service, inspector)
    collector = NodeTraceCollector(
        runtime, partial(_recorder, config, loaded), always=config.trace.events > 0
    )
    if config.trace.text:
        shell.tell = collector.text
    return runtime, engine


def _recorder(config: Config, loaded: Loaded, whole: bool) -> Recorder:
    me = loaded.me
    node = records.Node(
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
        config=settings(loaded.machine.config),
        whole=whole,
    )
    return Recorder(node, most=config.trace.events or MOST)


async def _first(stop: asyncio.Event, loading: asyncio.Future[Loaded]) -> Loaded:
    """What was loaded; the process ends here if it is told to stop before."""
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
    if stopping.done():
        # The loading thread cannot be interrupted, and nothing here needs to be put in order.
        sys.stderr.flush()
        os._exit(0)
    stopping.cancel()
    return loading.result()


def _in_thread(
    loop: asyncio.AbstractEventLoop, load: Callable[[], Loaded]
) -> asyncio.Future[Loaded]:
    """Run ``load`` in a thread that nobody waits for."""
    future: asyncio.Future[Loaded] = loop.create_future()

    def work() -> None:
        try:
            result = load()
        except BaseException as error:
            loop.call_soon_threadsafe(future.set_exception, error)
        else:
            loop.call_soon_threadsafe(future.set_result, result)

    threading.Thread(target=work, name="loading", daemon=True).start()
    return future


def _watch_parent(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """The parent holds the other end of stdin and never writes: its end is the parent's end."""
    descriptor = sys.stdin.fileno()

    def readable() -> None:
        if not os.read(descriptor, 4096):
            loop.remove_reader(descriptor)
            stop.set()

    try:
        loop.add_reader(descriptor, readable)
    except (OSError, PermissionError) as error:
        raise ClusterError(f"--supervised needs a pipe as stdin ({error})") from None
