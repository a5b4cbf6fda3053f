"""``asyncspec serve``: the HTTP service, over a running cluster or one that is started here."""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol, get_args

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.backend.registry import backend_of
from asyncspec.core.errors import AsyncSpecError, UserError
from asyncspec.core.paths import expanded
from asyncspec_nodes.cli import background, cluster_options
from asyncspec_nodes.client.client import ClusterAddress
from asyncspec_nodes.client.engine import ReconnectingEngine
from asyncspec_nodes.cluster.checkpoints import PLAIN, read_template
from asyncspec_nodes.cluster.config import Config, GenerationConfig
from asyncspec_nodes.cluster.named_models import named
from asyncspec_nodes.console import log
from asyncspec_nodes.console.arguments import Act, Parser, print_notice
from asyncspec_nodes.console.bounds import COUNT
from asyncspec_nodes.console.log import make_logger
from asyncspec_nodes.console.log_table import LogTable
from asyncspec_nodes.console.output import service_stderr
from asyncspec_nodes.console.signals import on_termination, unless_failed
from asyncspec_nodes.http import options as http_options
from asyncspec_nodes.http.app import Service
from asyncspec_nodes.http.options import HttpOptions
from asyncspec_nodes.http.server import HttpServer
from asyncspec_nodes.http.streaming import EngineClient
from asyncspec_nodes.local.cluster import LoadingSteps, LocalCluster
from asyncspec_nodes.local.service_file import ServiceFile
from asyncspec_nodes.node import listen
from asyncspec_nodes.node.reports import Report
from asyncspec_nodes.node.resources import freeze_objects, raise_file_limit
from asyncspec_nodes.node.supervisor import RESTARTS
from asyncspec_nodes.serving.requests import describe_defaults, read_defaults

SESSIONS = 4
"""Requests that a local cluster works on at a time; the others wait in its queue."""

ADDRESS = "--host and --port"

OF_A_LOCAL_CLUSTER = ("policy", "sessions", "disk_mib")
"""Arguments that a running cluster has already fixed, besides those for every command."""


class ServeOptions(Struct, frozen=True):
    """Everything ``serve`` needs, checked."""

    host: str
    port: int
    http: HttpOptions
    # A cluster to start here, or one to connect to.
    where: Config | ClusterAddress
    logs: Path | None
    log: LogTable
    # This process is a service in the background, which others are to find.
    detached: bool = False


STOP_SECONDS = 30.0
"""Time to end all processes once no answer runs."""


def add_arguments(parser: Parser, *, local: bool = True) -> None:
    """``local``: as in ``cluster_options``."""
    cluster_options.add_model_word(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1", metavar="HOST", help="default: 127.0.0.1")
    add("--port", type=int, default=8000, metavar="PORT", help="default: 8000; 0: any free one")
    http_options.add_arguments(parser)
    add(
        "--chat-template",
        metavar=f"FILE|{PLAIN}",
        help="in place of the chat template of the target's tokenizer (docs/reference/http.md)",
    )
    add(
        "--generation-config",
        choices=get_args(GenerationConfig),
        help="auto: requests that leave sampling settings out get what the target's "
        "generation_config.json recommends; none: OpenAI's defaults (default: auto)",
    )
    log.add_arguments(parser)
    if local:
        text = "start it and go on; asyncspec run and chat use it for the models that it serves"
        add(background.OPTION, action=Act, help=text)
        add(background.CHILDS_OPTION, action="store_true", help=argparse.SUPPRESS)
        text = "end the services that --background has started"
        add("--stop", action=Act, dest="stop_services", help=text)
    COUNT.add_to(parser, "--sessions", "N", f"default: {SESSIONS}")
    text = "disk of each stage for computed prompts, which outlive it ([cache] in the cluster file)"
    COUNT.add_to(parser, "--disk-mib", "N", text)
    cluster_options.add_arguments(parser, local=local)
    parser.exclude(cluster_options.CONNECTING, OF_A_LOCAL_CLUSTER)


def read_arguments(arguments: argparse.Namespace, *, local: bool = True) -> ServeOptions:
    """``local``: as in ``cluster_options``."""
    cluster_options.take_model_word(arguments)
    # A port that is taken is said before a model is looked for or read.
    listen_on(arguments).close()
    http = http_options.read_arguments(arguments, arguments.host)
    http.keys.check_disk_cache(arguments.disk_mib or 0)
    return ServeOptions(
        host=arguments.host,
        port=arguments.port,
        http=replace(http, models=http.models or _hub_names(arguments.target)),
        where=_where(arguments, local=local),
        logs=cluster_options.log_directory(arguments),
        log=log.read_arguments(arguments, LogTable()),
        detached=local and arguments.detached,
    )


def listen_on(arguments: argparse.Namespace) -> socket.socket:
    """``--host`` and ``--port``. Raises ``UserError``, and ``AddressError`` as ``listen.bind``."""
    if not 0 <= arguments.port < 65536:
        raise UserError(f"--port is {arguments.port}; it must be 0 to 65535")
    return listen.bind(arguments.host, arguments.port, whose=ADDRESS)


def _hub_names(target: str | None) -> tuple[str, ...]:
    """The name of a Hub target, whose download's directory is named after a commit, or its short
    name here; else none."""
    if target is None or expanded(target).is_dir():
        return ()
    if (model := named(target)) is not None:
        return (model.name,)
    return (backend_of(target).model_name(target),)


def _where(arguments: argparse.Namespace, *, local: bool) -> Config | ClusterAddress:
    sessions = arguments.sessions or SESSIONS
    where = cluster_options.read_arguments(arguments, sessions=sessions, local=local)
    if isinstance(where, ClusterAddress):
        cluster_options.leave_to_cluster(arguments, OF_A_LOCAL_CLUSTER)
        return where
    template = arguments.chat_template
    if template is None and arguments.target is None:
        template = PLAIN  # the bundled target was not made for conversations
    read_template(template)
    if template not in (None, PLAIN):
        template = str(Path(template).absolute())
    read_defaults(where.target.path, where.target.generation_config)
    target = replace(where.target, chat_template=template)
    if arguments.disk_mib is not None:
        where = replace(where, cache=replace(where.cache, disk_mib=arguments.disk_mib))
    return replace(where, target=target, log=log.read_arguments(arguments, where.log))


def run(arguments: argparse.Namespace) -> int:
    if arguments.stop_services:
        return background.stop()
    if arguments.background:
        return background.start(arguments.command_line, arguments.port)
    options = read_arguments(arguments)

    async def start(stack: AsyncExitStack, serving: Serving) -> LocalCluster | None:
        return await start_cluster(options, stack, serving)

    return run_service(options, start)


class Cluster(Protocol):
    """A cluster of this command's own."""

    async def watch(self) -> AsyncSpecError:
        """Wait for what ends it; the error to report."""


class Serving:
    """What a service is made of while it starts."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.engine: EngineClient
        # Receives a line for each event.
        self.notify = notify
        # What has to happen before requests are served.
        self.pending: Callable[[], str] = str
        # Where a service in the background says what it does.
        self.file: ServiceFile | None = None
        # The cluster that it has started, on this machine, and the guarantee of its stages.
        self.config: Config | None = None
        self.guarantee = ""

    def reports_to(self, steps: LoadingSteps) -> Callable[[Report], None]:
        """A receiver of reports for ``steps``, after each of which the file says what they are."""
        if self.file is None:
            return steps
        file = self.file

        def receive(report: Report) -> None:
            steps(report)
            file.loads(steps.pending())

        return receive


Start = Callable[[AsyncExitStack, Serving], Coroutine[Any, Any, Cluster | None]]
"""Starts or finds a cluster, and sets the engine."""


def run_service(options: ServeOptions, start: Start) -> int:
    """Serve HTTP until a signal. Raises ``AsyncSpecError``."""
    raise_file_limit()
    with listen.bind(options.host, options.port, whose=ADDRESS) as sock, service_stderr():
        return asyncio.run(_serve(options, start, sock))


async def _serve(options: ServeOptions, start: Start, sock: socket.socket) -> int:
    stop = asyncio.Event()
    on_termination(stop.set)
    http, logger = options.http, make_logger(options.log)
    serving = Serving(partial(_notify, logger) if options.log.format == "json" else print_notice)
    notify = serving.notify

    def pending() -> str:
        """What has to happen before requests are served."""
        return serving.pending() or "the link to the draft node"

    service = Service(http, pending, logger)
    # It listens from the start, so that probes of its liveness succeed while it loads.
    async with AsyncExitStack() as stack, HttpServer(service, sock, http.tls) as server:
        if options.detached:
            limit = http.limits.drain_seconds + STOP_SECONDS
            config = options.where if isinstance(options.where, Config) else None
            serving.file = stack.enter_context(ServiceFile(server.port, limit, config))
            bounding = asyncio.create_task(background.keep_log_bounded(options.port))
            stack.callback(bounding.cancel)
        starting = asyncio.create_task(start(stack, serving))
        stopping = asyncio.create_task(stop.wait())
        stack.callback(stopping.cancel)
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 0
        cluster, engine = starting.result(), serving.engine
        draft = next(node for node in await engine.nodes() if node.role == "draft")
        model, *aliases = http.models or (draft.model,)
        service.serve(engine, model, *aliases)
        freeze_objects()
        if defaults := describe_defaults(draft.defaults):
            notify(
                f"{defaults}: what the target recommends, for requests that do not say otherwise"
            )
        if draft.draft:
            notify(f"draft: {draft.draft}")
        if options.log.format == "json":
            logger.info("serving", model=model, url=server.url)
        else:
            sys.stderr.write(f"serving {model} on {server.url}\n")
        if serving.file is not None:
            serving.file.serves(server.url, model, serving.config, serving.guarantee)
        await _until(stop, server, cluster, notify)
    return 0


def _notify(logger: Any, line: str) -> None:
    logger.info("notice", text=line)


async def start_cluster(
    options: ServeOptions, stack: AsyncExitStack, serving: Serving
) -> LocalCluster | None:
    """Set the engine of ``serving``, over a cluster that is started here (which is returned) or a
    running one. Raises ``AsyncSpecError``."""
    where, cluster, notify = options.where, None, serving.notify
    if isinstance(where, Config):
        steps = LoadingSteps(where.stages)
        serving.pending = steps.pending
        reports = serving.reports_to(steps)
        cluster = LocalCluster(where, reports, options.logs, restarts=RESTARTS, notify=notify)
        with steps.display():
            await stack.enter_async_context(cluster)
        serving.config, serving.guarantee = cluster.config, cluster.guarantee
        where = ClusterAddress(*cluster.address, where.cluster.name)
        notify(f"its draft node, for asyncspec run --connect: {where.host}:{where.port}")
    else:
        there = f"the draft node at {where.host}:{where.port}"
        serving.pending = lambda: there
    serving.engine = await stack.enter_async_context(ReconnectingEngine(where.connect))
    return cluster


async def _until(
    stop: asyncio.Event,
    server: HttpServer,
    cluster: Cluster | None,
    notify: Callable[[str], None],
) -> None:
    """Until a signal, and then until what runs has ended or a second one comes; or until a node
    of a cluster of our own ends for good, which is an error."""
    await (stop.wait() if cluster is None else unless_failed(stop.wait(), cluster.watch()))
    stop.clear()
    if running := server.service.shutdown.running:
        notify(_waited_for(running, server.service.options.limits.drain_seconds))
    await server.drain(stop)


def _waited_for(running: int, seconds: float) -> str:
    answers = "an answer" if running == 1 else f"{running} answers"
    return f"waits up to {seconds:g} s for {answers} to end; a second Ctrl-C ends the service now"
