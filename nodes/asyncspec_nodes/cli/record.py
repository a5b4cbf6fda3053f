"""``asyncspec record``: what a running cluster did in the last seconds, or does in the next."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from pathlib import Path

from asyncspec.trace.file import TraceWriter
from asyncspec_nodes.client import remote
from asyncspec_nodes.client.remote import ClusterAddress
from asyncspec_nodes.client.trace_download import TraceDownload
from asyncspec_nodes.console import arguments as numbers
from asyncspec_nodes.console.arguments import Parser
from asyncspec_nodes.console.signals import on_termination


def add_arguments(parser: Parser) -> None:
    """The arguments of ``asyncspec record``."""
    remote.add_arguments(parser)
    span = parser.add_mutually_exclusive_group()
    span.add_argument(
        "--last",
        type=float,
        metavar="S",
        help="the last S seconds (needs [trace] events in the cluster file)",
    )
    span.add_argument(
        "--for",
        dest="seconds",
        type=float,
        metavar="S",
        help="the next S seconds; without either, until interrupted",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="where the trace goes")


def run(arguments: argparse.Namespace) -> int:
    """The whole command. Raises ``AsyncSpecError``."""
    numbers.SOME_SECONDS.check("--last", arguments.last)
    numbers.SOME_SECONDS.check("--for", arguments.seconds)
    where = remote.read_arguments(arguments)
    return asyncio.run(_record(where, arguments.file, arguments.last, arguments.seconds))


async def _record(
    where: ClusterAddress, path: Path, last: float | None, seconds: float | None
) -> int:
    named = f"{where.cluster} at " if where.cluster else ""
    writer = TraceWriter(path, title=f"{named}{where.host}:{where.port}")
    with contextlib.closing(writer):
        client = await remote.connect(where)
        try:
            async with TraceDownload(client, writer, last=last or 0.0) as collector:
                if last is None:
                    await _until(client.link.gone, seconds)
        finally:
            await client.close()
    sys.stderr.write(f"{collector.lines} events in {path}; asyncspec trace {path} shows them\n")
    if not collector.complete:
        sys.stderr.write("the cluster did not deliver its last events\n")
    return 0 if collector.complete else 1


async def _until(gone: asyncio.Future[str], seconds: float | None) -> None:
    """Until the time is over, a signal comes, or the cluster is gone."""
    stop = asyncio.Event()
    on_termination(stop.set)
    stopped = asyncio.create_task(stop.wait())
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait((stopped, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
