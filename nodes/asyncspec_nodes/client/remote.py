"""Command-line arguments that name a running cluster."""

from __future__ import annotations

import argparse
from pathlib import Path

from msgspec import Struct

from asyncspec.core.errors import UserError
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.cluster.config import Config, SecurityTable, load
from asyncspec_nodes.cluster.security import contexts
from asyncspec_nodes.console.arguments import Parser, host_and_port
from asyncspec_protocol.ids import DRAFT


class ClusterAddress(Struct, frozen=True):
    host: str
    port: int
    # Empty: any.
    cluster: str
    security: SecurityTable | None


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--connect",
        metavar="HOST:PORT",
        help="use the draft node of a running cluster (one with keys: with --config)",
    )
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="cluster file of the cluster to connect to: its draft node's address, and which keys "
        "to show",
    )
    add("--cluster", metavar="NAME", help="refuse a cluster of another name")


def wanted(arguments: argparse.Namespace) -> bool:
    """Whether a running cluster was named."""
    return arguments.connect is not None or arguments.config is not None


def read_arguments(arguments: argparse.Namespace) -> ClusterAddress:
    """The cluster that was named. Raises ``UserError``."""
    config = None if arguments.config is None else load(arguments.config)
    host, port = _address(arguments.connect, config)
    return ClusterAddress(
        host=host,
        port=port,
        cluster=arguments.cluster or (config.cluster.name if config else ""),
        security=None if config is None else config.security,
    )


async def connect(remote: ClusterAddress) -> Client:
    """A client of it. Raises ``ClusterError`` or ``UserError``, as ``Client.connect`` does."""
    tls = contexts(remote.security).client
    return await Client.connect(remote.host, remote.port, remote.cluster, tls=tls)


def _address(text: str | None, config: Config | None) -> tuple[str, int]:
    if text is None:
        if config is None:
            raise UserError("which cluster? give --connect HOST:PORT or --config FILE")
        draft = config.find(DRAFT)
        if draft is None:
            raise UserError("the cluster file has no draft node; give --connect HOST:PORT of one")
        return draft.host, draft.port
    return host_and_port("--connect", text)
