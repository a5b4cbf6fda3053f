"""``asyncspec record``: what a running cluster did in the last seconds, or does in the next."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from pathlib import Path

from asyncspec.trace.file import TraceWriter
from asyncspec_nodes.cli import cluster_options
from asyncspec_nodes.client.trace_download import TraceDownload
from asyncspec_nodes.console.arguments import Parser
from asyncspec_nodes.console.bounds import SOME_SECONDS
from asyncspec_nodes.console.signals import on_termination


def add_arguments(parser: Parser) -> None:
    cluster_options.add_address_arguments(parser)
    span = parser.add_mutually_exclusive_group()
    text = "the last S seconds (needs [trace] events in the cluster file)"
    SOME_SECONDS.add_to(span, "--last", "S", text)
    text = "the next S seconds; without either, until interrupted"
    SOME_SECONDS.add_to(span, "--for", "S", text, dest="seconds")
    text = "with the token ids of what all users ask and are told (texts too with [trace] text)"
    parser.add_argument("--tokens", action="store_true", help=text)
    parser.add_argument("file", type=Path, metavar="FILE", help="where the trace goes")


def run(arguments: argparse.Namespace) -> int:
    return asyncio.run(_record(arguments))


async def _record(arguments: argparse.Namespace) -> int:
    where, path, last = cluster_options.read_address(arguments), arguments.file, arguments.last
    named = f"{where.cluster} at " if where.cluster else ""
    shown, since = arguments.tokens, last or 0.0
    async with await where.connect() as client:
        # No file is made where nothing answers.
        writer = TraceWriter(path, title=f"{named}{where.host}:{where.port}")
        with contextlib.closing(writer):
            async with TraceDownload(client, writer, last=since, tokens=shown) as download:
                if last is None:
                    await _until(client.link.gone, arguments.seconds)
    sys.stderr.write(f"{download.lines} events in {path}; asyncspec trace {path} shows them\n")
    if not download.complete:
        sys.stderr.write("the cluster did not deliver its last events\n")
    return 0 if download.complete else 1


async def _until(gone: asyncio.Future[str], seconds: float | None) -> None:
    """Until the time is over, a signal comes, or the cluster is gone."""
    stop = asyncio.Event()
    on_termination(stop.set)
    stopped = asyncio.create_task(stop.wait())
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait((stopped, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
