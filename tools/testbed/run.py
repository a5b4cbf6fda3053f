"""``asyncspec run`` on a bed: the same options, the same output, other devices."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from asyncspec.core.errors import AsyncSpecError, UserError
from asyncspec_nodes.cli import cluster_options, run_options
from asyncspec_nodes.cli.run import Run
from asyncspec_nodes.cli.run_options import RunOptions
from asyncspec_nodes.cluster.config import Config
from asyncspec_nodes.console.arguments import Parser
from asyncspec_nodes.console.signals import until_signal
from asyncspec_nodes.local.cluster import LoadingSteps
from tools.testbed.bed import Bed
from tools.testbed.cluster import BedCluster
from tools.testbed.cluster_file import check_fit
from tools.testbed.tables import Description


def options_for(description: Description, argv: Sequence[str]) -> RunOptions:
    """The options of ``asyncspec run``, with as many stages as the bed has devices for. Raises
    ``UserError``."""
    parser = Parser(prog="testbed run: asyncspec run")
    run_options.add_arguments(parser)
    arguments = parser.parse_args(argv)
    if cluster_options.connects(arguments):
        raise UserError("a bed starts its own cluster; leave --connect and --config out")
    if arguments.stages is None:
        arguments.stages = len(description.device) - 1 - arguments.source_apart
    options = run_options.read_arguments(arguments)
    check_fit(description, _config(options))
    return options


def run(bed: Bed, options: RunOptions) -> int:
    """Ask the prompts; the exit code. Raises ``AsyncSpecError``; a signal ends in
    ``KeyboardInterrupt``."""
    return asyncio.run(until_signal(Run(options, partial(BedCluster, bed)).work()))


def serve(bed: Bed, options: RunOptions) -> int:
    """Start the cluster for others to ask, until a signal ends it with ``KeyboardInterrupt``."""
    return asyncio.run(until_signal(_serve(bed, options)))


async def _serve(bed: Bed, options: RunOptions) -> int:
    config = _config(options)
    steps, stack = LoadingSteps(config.stages), AsyncExitStack()
    with steps.display():
        cluster = await stack.enter_async_context(BedCluster(bed, config, steps, options.logs))
    async with stack:
        host, port = cluster.address
        name = config.cluster.name
        print(f"asyncspec run --connect {host}:{port} --cluster {name}", flush=True)
        raise await _first(cluster.watch(), bed.watch())


async def _first(*watches: Coroutine[Any, Any, AsyncSpecError]) -> AsyncSpecError:
    """What the first of them comes to."""
    tasks = [asyncio.create_task(watch) for watch in watches]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()


def _config(options: RunOptions) -> Config:
    assert isinstance(options.where, Config)  # no running cluster was named, see options_for
    return options.where
