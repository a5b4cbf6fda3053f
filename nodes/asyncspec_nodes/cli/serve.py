"""``asyncspec serve``: the HTTP service, over a running cluster or one that is started here."""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from contextlib import AsyncExitStack
from functools import partial

from asyncspec.backend.threads import set_thread_count
from asyncspec.core.errors import AsyncSpecError
from asyncspec_nodes.cli import serve_options
from asyncspec_nodes.cli.serve_options import ServeOptions
from asyncspec_nodes.client import remote
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.client.engine import ReconnectingEngine
from asyncspec_nodes.client.remote import ClusterAddress
from asyncspec_nodes.cluster.config import Config
from asyncspec_nodes.console.arguments import print_notice
from asyncspec_nodes.console.signals import on_termination
from asyncspec_nodes.http.app import Service
from asyncspec_nodes.http.server import HttpServer
from asyncspec_nodes.local.cluster import RESTART_ALL, LocalCluster
from asyncspec_nodes.local.progress import LoadingSteps, progress_display
from asyncspec_nodes.node import listen
from asyncspec_nodes.node.reports import Report
from asyncspec_nodes.serving.requests import describe_defaults
from asyncspec_protocol.messages import Status


def run(arguments: argparse.Namespace) -> int:
    """The whole command. Raises ``AsyncSpecError``."""
    options = serve_options.read_arguments(arguments)
    if options.threads is not None:
        set_thread_count(options.threads)  # children inherit it
    sock = listen.bind(options.host, options.port, whose="--host and --port")
    with sock:
        return asyncio.run(_serve(options, sock))


async def _serve(options: ServeOptions, sock: socket.socket) -> int:
    stop = asyncio.Event()
    on_termination(stop.set)
    http, where = options.http, options.where
    steps = LoadingSteps(0 if isinstance(where, ClusterAddress) else where.stages)
    service = Service(
        keys=http.keys,
        hosts=http.hosts,
        origins=http.origins,
        limits=http.limits,
        pending=partial(_pending, where, steps),
    )
    # It listens from the start: whoever watches this process sees that it is alive while it loads.
    async with AsyncExitStack() as stack, HttpServer(service, sock, http.tls) as server:
        starting = asyncio.create_task(_start(options, stack, steps))
        stopping = asyncio.create_task(stop.wait())
        stack.callback(stopping.cancel)
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 0
        engine, cluster, draft = starting.result()
        model = http.model or draft.model
        service.serve(engine, model)
        if defaults := describe_defaults(draft.defaults):
            print_notice(
                f"{defaults}: what the target recommends, for requests that do not say otherwise"
            )
        sys.stderr.write(f"serving {model} on {server.url}\n")
        await _until(stop, server, cluster)
    return 0


def _pending(where: Config | ClusterAddress, steps: LoadingSteps) -> str:
    """What stands between now and the first request that is served."""
    if isinstance(where, ClusterAddress):
        return f"the draft node at {where.host}:{where.port}"
    return steps.pending() or "the link to the draft node"


async def _start(
    options: ServeOptions, stack: AsyncExitStack, steps: LoadingSteps
) -> tuple[ReconnectingEngine, LocalCluster | None, Status]:
    """The engine, the cluster where it is one of our own, and how its draft node is."""
    engine, cluster = await _engine(options, stack, steps)
    return engine, cluster, next(node for node in await engine.nodes() if node.role == "draft")


async def _engine(
    options: ServeOptions, stack: AsyncExitStack, steps: LoadingSteps
) -> tuple[ReconnectingEngine, LocalCluster | None]:
    where = options.where
    if isinstance(where, ClusterAddress):
        return await stack.enter_async_context(
            ReconnectingEngine(partial(remote.connect, where))
        ), None
    with progress_display(where.stages) as progress:

        def heard(report: Report) -> None:
            steps(report)
            progress(report)

        cluster = LocalCluster(
            where, heard, options.logs, restarts=RESTART_ALL, notify=print_notice
        )
        await stack.enter_async_context(cluster)
    host, port = cluster.address
    print_notice(f"its draft node, for asyncspec run --connect: {host}:{port}")
    connect = partial(Client.connect, host, port, where.cluster.name)
    return await stack.enter_async_context(ReconnectingEngine(connect)), cluster


async def _until(stop: asyncio.Event, server: HttpServer, cluster: LocalCluster | None) -> None:
    """Until a signal, and then until what runs has ended or a second one comes; or until a node
    of a cluster of our own ends for good, which is an error."""
    watch: asyncio.Task[AsyncSpecError] | None = None
    if cluster is not None:
        watch = asyncio.create_task(cluster.watch())
    stopping = asyncio.create_task(stop.wait())
    tasks = {stopping} if watch is None else {stopping, watch}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if watch is not None and watch.done():
            raise watch.result()
        stop.clear()
        await server.drain(stop)
    finally:
        for task in tasks:
            task.cancel()
