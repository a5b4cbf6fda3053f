"""``asyncspec up``: a cluster without a file. Other machines join it; it serves HTTP."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from asyncspec.backend.registry import backend_of_source, draft_runtime_bytes
from asyncspec.backend.threads import set_thread_count
from asyncspec.core.errors import AsyncSpecError, ClusterError
from asyncspec.source.registry import needs_backend
from asyncspec_nodes.cli import cluster_options, serve
from asyncspec_nodes.cli.serve import Serving
from asyncspec_nodes.client.client import ClusterAddress
from asyncspec_nodes.client.engine import ReconnectingEngine
from asyncspec_nodes.cluster.checkpoints import parts
from asyncspec_nodes.cluster.config import ClusterTable, Config
from asyncspec_nodes.cluster.placement import MAX_CONTEXT, cluster_cost
from asyncspec_nodes.console import bounds
from asyncspec_nodes.console.arguments import Parser, state_file
from asyncspec_nodes.console.interrupt import exit_on_interrupt
from asyncspec_nodes.console.waiting import Waiting, show_waits
from asyncspec_nodes.node import listen
from asyncspec_nodes.node.resources import cores, threads_are_set
from asyncspec_nodes.plugins.join import join_command as join
from asyncspec_nodes.plugins.join.coordinator import Coordinator, CoordinatorOptions
from asyncspec_nodes.plugins.join.messages import PORTS
from asyncspec_nodes.plugins.join.ray.launcher import RayLauncher, check_installed
from asyncspec_nodes.plugins.join.ray.messages import RayOptions
from asyncspec_nodes.plugins.join.token import Token

REJOIN_SECONDS = 120.0
"""Requests wait for so long for the layers of a machine that has left, before they fail."""

CPUS = bounds.Bounds(0.0, 1e4, above=True)


def add_arguments(parser: Parser) -> None:
    serve.add_arguments(parser, local=False)
    join.add_machine_arguments(parser)
    add = parser.add_argument
    text = (
        "where machines may join; the four ports after it are this machine's stages', four more "
        "carry links of others; HOST:0: any (default: 0.0.0.0:0)"
    )
    add("--listen", metavar="HOST:PORT", default="0.0.0.0:0", help=text)
    text = "keeps the token from one run to the next (default: ~/.local/state/asyncspec/up.json)"
    add("--token-file", type=Path, metavar="FILE", help=text)
    add("--new-token", action="store_true", help="earlier tokens are void")
    text = (
        "to wait for, this one included (default: until the target fits and none has joined for "
        "10 s)"
    )
    bounds.COUNT.add_to(parser, "--machines", "N", text)
    join.WAIT.add_to(parser, "--wait", "S", "for machines to join (default: 600)", default=600.0)
    add_ray_arguments(parser)
    text = (
        "spares load the stage whose loss would cost most, and fetch the others' layers and keep "
        "them in the page cache"
    )
    add("--warm", action="store_true", help=text)
    add("--no-stage", action="store_true", help="this machine drafts and holds no layers")
    text = f"tokens of all sessions' caches (default: the model's, at most {MAX_CONTEXT})"
    bounds.POSITIONS.add_to(parser, "--context", "TOKENS", text)


def add_ray_arguments(parser: Parser) -> None:
    """Machines that Ray starts."""
    group = parser.add_argument_group(
        "Ray", "machines from an existing Ray cluster (asyncspec[ray])"
    )
    text = "start so many machines, each an actor on a Ray node of its own; again where one is lost"
    bounds.COUNT.add_to(group, "--ray", "N", text)
    defaults = RayOptions(1)
    text = f"of each Ray node (default: {defaults.cpus:g})"
    CPUS.add_to(group, "--ray-cpus", "CPUS", text, default=defaults.cpus)
    text = f"default: {defaults.address}, the cluster that this machine belongs to"
    group.add_argument("--ray-address", metavar="ADDRESS", default=defaults.address, help=text)


def _ray(arguments: argparse.Namespace) -> RayOptions | None:
    """With it this machine drafts, and waits for those of Ray unless told otherwise."""
    if arguments.ray is None:
        return None
    check_installed()
    arguments.no_stage = True
    if arguments.machines is None:
        arguments.machines = arguments.ray
    return RayOptions(
        arguments.ray, arguments.ray_cpus, arguments.ray_address, seconds=arguments.wait
    )


def run(arguments: argparse.Namespace) -> int:
    """Until a signal. Raises ``AsyncSpecError``."""
    ray_options = _ray(arguments)
    address = join.read_listen(arguments.listen)
    _check_addresses(arguments, address)
    for name in cluster_options.LOCAL:
        setattr(arguments, name, None)
    if not (arguments.no_stage or arguments.threads or threads_are_set()):
        # The draft node and the stage here share the cores.
        set_thread_count(max(1, cores() // 2))
    stages, arguments.stages = arguments.stages, 1
    options = serve.read_arguments(arguments, local=False)
    assert isinstance(options.where, Config)
    config = _config(options.where, arguments.name)
    with exit_on_interrupt(), Waiting("reads what the target takes"):
        target = cluster_cost(
            config, config.draft.policy, context=arguments.context or arguments.ctx_size
        )
    how = CoordinatorOptions(
        arguments.name,
        address,
        join.read_advertise(arguments.advertise),
        arguments.token_file or state_file("up.json"),
        arguments.new_token,
        machines=arguments.machines,
        stages=stages,
        warm=arguments.warm,
        wait_seconds=arguments.wait,
        holds=not arguments.no_stage,
        memory=join.memory(arguments),
        speed=join.speed(arguments),
        draft_bytes=_draft_bytes(config),
        asks=sys.stdin is not None and sys.stdin.isatty(),
    )

    async def start(stack: AsyncExitStack, serving: Serving) -> serve.Cluster:
        launcher: RayLauncher | None = None
        if ray_options is not None:
            launcher = await stack.enter_async_context(RayLauncher(ray_options, serving.notify))
        show = _show if launcher is None else launcher.start
        cluster = Coordinator(config, target, how, show, serving.notify)
        serving.pending = cluster.pending
        entering = stack.enter_async_context(cluster)
        showing = asyncio.create_task(show_waits("waits", cluster.pending))
        stack.callback(showing.cancel)
        with _enter_key(cluster.pressed, how.asks):
            await (entering if launcher is None else launcher.while_it_runs(entering))
        where = ClusterAddress(*cluster.address, config.cluster.name, cluster.security)
        # New requests wait for a draft node that starts again because layers move.
        engine = ReconnectingEngine(where.connect, waits=True)
        serving.engine = await stack.enter_async_context(engine)
        cluster.is_idle = partial(_is_idle, engine)
        stack.callback(cluster.watch_links(serving.engine.nodes).cancel)
        serving.notify(f"on this machine also: asyncspec run --config {cluster.file}")
        return cluster if launcher is None else _OnRay(cluster, launcher)

    return serve.run_service(options, start)


def _check_addresses(arguments: argparse.Namespace, address: tuple[str, int]) -> None:
    """Listen for a moment on all that this machine is to listen on: a port that is taken is said
    before a model is read. Raises ``UserError``."""
    host, port = address
    whose = "--listen, or a port after it"
    with ExitStack() as stack:
        stack.enter_context(serve.listen_on(arguments))
        for number in range(1 + PORTS) if port else (0,):
            stack.enter_context(listen.bind(host, port and port + number, whose=whose))


class _OnRay(NamedTuple):
    """A cluster whose machines Ray starts: it ends where one of them does."""

    cluster: Coordinator
    launcher: RayLauncher

    async def watch(self) -> AsyncSpecError:
        """The error to report."""
        return await self.launcher.while_it_runs(self.cluster.watch())


def _config(local: Config, name: str) -> Config:
    """The configuration of a local cluster, with the draft node alone."""
    return replace(
        local,
        cluster=ClusterTable(name=f"up-{name}"[:64]),
        limits=replace(local.limits, rejoin_seconds=REJOIN_SECONDS),
        node=tuple(node for node in local.node if node.rank == 0),
        pace={},
    )


def _draft_bytes(config: Config) -> int:
    """What the draft node takes of this machine."""
    target = config.target.path
    models = [name for name in parts(config.draft.source) if needs_backend(name)]
    how = (target, config.target.dtype, config.engine_of(0).device)
    weights = sum(
        backend_of_source(name, target).source_footprint(name, *how).weights for name in models
    )
    return weights + draft_runtime_bytes(target, models)


async def _is_idle(engine: ReconnectingEngine) -> bool:
    """Whether nobody asks now; False where the draft node does not say."""
    try:
        nodes = await engine.nodes()
    except ClusterError:
        return False
    return all(not node.sessions and not node.waiting for node in nodes if node.role == "draft")


@contextmanager
def _enter_key(pressed: Callable[[], None], asks: bool) -> Iterator[None]:
    """Inside, ``pressed`` is called for each line that a user at the terminal enters."""
    if not asks:
        yield
        return
    loop, stdin = asyncio.get_running_loop(), sys.stdin

    def read() -> None:
        if os.tcgetpgrp(stdin.fileno()) != os.getpgrp():
            # Reading the terminal would stop a process in the background.
            loop.remove_reader(stdin)
        elif stdin.readline():
            pressed()
        else:  # the terminal is gone
            loop.remove_reader(stdin)

    try:
        loop.add_reader(stdin, read)
    except (OSError, NotImplementedError, ValueError):
        yield
        return
    try:
        yield
    finally:
        loop.remove_reader(stdin)


def _show(token: Token) -> None:
    sys.stderr.write(f"asyncspec: on the other machines: asyncspec join {token}\n")
