"""Which node of a cluster this process is, and where it listens.

Stages and the token source have their places in the cluster file. Draft nodes may have one (rank
0), but need none: whoever has the file and, where there is one, a key of the cluster may draft.
"""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.backend.hf.repository import open_files
from asyncspec.errors import UserError
from asyncspec_nodes.cli.arguments import Parser, host_and_port
from asyncspec_nodes.cluster.checkpoints import check_draft
from asyncspec_nodes.cluster.config_rules import check_reach
from asyncspec_nodes.cluster.config_tables import Config
from asyncspec_nodes.node import listen
from asyncspec_protocol.handshake import role_of
from asyncspec_protocol.ids import DRAFT, MOST_DRAFTS, Rank, draft_rank


class Place(Struct, frozen=True):
    """A node of a cluster, and its listening socket."""

    config: Config
    rank: Rank
    sock: socket.socket

    @property
    def host(self) -> str:
        """The address it listens on; as the cluster file says it, if it does."""
        known = self.config.find(self.rank)
        return str(self.sock.getsockname()[0]) if known is None else known.host


def add_arguments(parser: Parser) -> None:
    """``--role``, ``--rank`` and what says where to listen."""
    add = parser.add_argument
    add("--role", required=True, choices=["draft", "verify", "source"])
    add(
        "--rank",
        required=True,
        type=int,
        help="1..N verify, N+1 is the source; draft nodes have the numbers 0, 1, 2, ...",
    )
    add("--config", required=True, type=Path, metavar="FILE", help="cluster file")
    add(
        "--listen",
        metavar="HOST:PORT",
        help="draft node: where clients reach it, if the cluster file does not say so",
    )
    add(
        "--source",
        metavar="NAME",
        help="draft node: what proposes tokens here, in place of [draft] source and its node",
    )
    add("--listen-fd", type=int, metavar="N", help="inherited listening socket")


def rank(arguments: argparse.Namespace) -> Rank:
    """The rank that was asked for, of whatever sense that is."""
    number = arguments.rank
    fine = arguments.role == "draft" and 0 <= number < MOST_DRAFTS
    return draft_rank(number) if fine else Rank(number)


def take(arguments: argparse.Namespace, config: Config) -> Place:
    """Listen where this node has to. Raises ``UserError``."""
    if arguments.role == "draft":
        config = _draft(arguments, config)
    else:
        _check_listed(arguments, config)
    return Place(config, rank(arguments), _sock(arguments, config))


def _sock(arguments: argparse.Namespace, config: Config) -> socket.socket:
    if arguments.listen_fd is not None:
        return listen.inherited(arguments.listen_fd)
    if arguments.listen is not None:
        host, port = host_and_port("--listen", arguments.listen)
        check_reach(config, host, "--listen")
        return listen.bind(host, port, whose="--listen")
    at = config.at(rank(arguments))
    return listen.bind(at.host, at.port, whose=f"rank {at.rank}")


def _draft(arguments: argparse.Namespace, config: Config) -> Config:
    """What a draft node makes of the cluster file."""
    number = arguments.rank
    if not 0 <= number < MOST_DRAFTS:
        raise UserError(f"--rank is {number}; draft nodes are 0 to {MOST_DRAFTS - 1}")
    placed = arguments.listen is not None or arguments.listen_fd is not None
    if not placed and config.find(draft_rank(number)) is None:
        stage = config.find(number)
        but = f"rank {number} is not a draft node there, use --role verify; or " if stage else ""
        raise UserError(
            f"{arguments.config} does not say where draft node {number} listens: {but}"
            "give --listen HOST:PORT"
        )
    if arguments.source is None:
        return config
    source = check_draft(arguments.source, open_files(config.target.path).directory.absolute())
    return replace(config, draft=replace(config.draft, source=source), source=None)


def _check_listed(arguments: argparse.Namespace, config: Config) -> None:
    """Stages and the token source have their place in the cluster file."""
    number, role = arguments.rank, arguments.role
    for name in ("listen", "source"):
        if getattr(arguments, name) is not None:
            raise UserError(f"--{name} is for draft nodes; the cluster file says it of the others")
    ranks = sorted(node.rank for node in config.nodes)
    if number != DRAFT and number not in ranks:
        raise UserError(f"{arguments.config} has ranks {ranks[0]} to {ranks[-1]}, not {number}")
    fits = role_of(number, config.stages)
    if role != fits:
        raise UserError(f"rank {number} is not a {role} node; use --role {fits}")
