"""``asyncspec drain``: before a draft node is stopped."""

from __future__ import annotations

import argparse
import asyncio
import sys

from asyncspec.core.errors import ClusterError
from asyncspec_nodes.cli import cluster_options
from asyncspec_nodes.console.arguments import Parser
from asyncspec_nodes.console.bounds import SOME_SECONDS

WAIT_SECONDS = 600.0


def add_arguments(parser: Parser) -> None:
    cluster_options.add_address_arguments(parser)
    text = f"for running requests (default: {WAIT_SECONDS:g}); then exit code 1"
    SOME_SECONDS.add_to(parser, "--wait", "S", text, default=WAIT_SECONDS)
    parser.add_argument("--undo", action="store_true", help="take requests again")


def run(arguments: argparse.Namespace) -> int:
    return asyncio.run(_drain(arguments))


async def _drain(arguments: argparse.Namespace) -> int:
    async with await cluster_options.read_address(arguments).connect() as client:
        try:
            async with asyncio.timeout(arguments.wait):
                await client.drain(on=not arguments.undo)
        except TimeoutError:
            raise ClusterError(
                f"requests still run after {arguments.wait:g} s; no new ones are taken"
            ) from None
    sys.stderr.write("requests are taken again\n" if arguments.undo else "no request is left\n")
    return 0
