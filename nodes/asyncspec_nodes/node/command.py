"""``asyncspec-node``: its arguments, the node they name, and its exit code.

Stages and the token source are listed in the cluster file. Draft nodes need no table: any process
with the file and, under [security], a certificate of the cluster may draft. Thread settings are
made before torch is imported.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

from msgspec.structs import replace

from asyncspec.backend import kept_results
from asyncspec.core.errors import AsyncSpecError, UserError
from asyncspec_nodes.cluster.checkpoints import AUTO, check_draft
from asyncspec_nodes.cluster.config import Config
from asyncspec_nodes.cluster.file import check_reach, load
from asyncspec_nodes.console import log
from asyncspec_nodes.console.arguments import Parser, Version, host_and_port
from asyncspec_nodes.console.bounds import NEW_STARTS, THREADS
from asyncspec_nodes.console.log_table import LogTable
from asyncspec_nodes.http import options as http_options
from asyncspec_nodes.http.options import HttpSocket
from asyncspec_nodes.node import listen, resources
from asyncspec_nodes.node.preloading import preload_model
from asyncspec_nodes.node.reports import Reporter
from asyncspec_nodes.node.supervisor import RESTARTS, SUPERVISES, Again, Supervisor
from asyncspec_protocol.ids import DRAFT, MAX_DRAFTS, Rank, draft_rank
from asyncspec_protocol.links import role_of


def rank(arguments: argparse.Namespace) -> Rank:
    """The rank named by ``--role`` and ``--rank``, unchecked."""
    number = arguments.rank
    fine = arguments.role == "draft" and 0 <= number < MAX_DRAFTS
    return draft_rank(number) if fine else Rank(number)


def _listen(arguments: argparse.Namespace, config: Config) -> socket.socket:
    if arguments.listen_fd is not None:
        return listen.inherited(arguments.listen_fd)
    if arguments.listen is not None:
        host, port = host_and_port("--listen", arguments.listen)
        check_reach(config, host, "--listen")
        return listen.bind(host, port, whose="--listen")
    at = config.at(rank(arguments))
    if at.listen is not None:
        return listen.bind(*host_and_port("listen", at.listen), whose=f"listen of rank {at.rank}")
    return listen.bind(at.host, at.port, whose=f"rank {at.rank}")


def _draft(arguments: argparse.Namespace, config: Config) -> Config:
    """The cluster configuration as this draft node uses it."""
    number = arguments.rank
    if not 0 <= number < MAX_DRAFTS:
        raise UserError(f"--rank is {number}; draft nodes are 0 to {MAX_DRAFTS - 1}")
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
    source = arguments.source
    if source != AUTO:
        source = check_draft(source, config.target.path)
    return replace(config, draft=replace(config.draft, source=source), source=None)


def _check_listed(arguments: argparse.Namespace, config: Config) -> None:
    """Raises ``UserError`` for a stage or token source that the cluster file does not list."""
    number, role = arguments.rank, arguments.role
    if arguments.source is not None:
        raise UserError("--source is for draft nodes; the cluster file says it of the others")
    ranks = sorted(node.rank for node in config.nodes)
    if number != DRAFT and number not in ranks:
        raise UserError(f"{arguments.config} has ranks {ranks[0]} to {ranks[-1]}, not {number}")
    fits = role_of(number, config.stages)
    if role != fits:
        raise UserError(f"rank {number} is not a {role} node; use --role {fits}")


def build_parser() -> Parser:
    """The command line of ``asyncspec-node``."""
    parser = Parser(prog="asyncspec-node", description="Run one node of a cluster.")
    add = parser.add_argument
    add("--version", action=Version)
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
        help="in place of the cluster file's address, which stays the one that others use; of a "
        "draft node that is not listed, where clients reach it",
    )
    add(
        "--source",
        metavar="NAME",
        help="draft node: what proposes tokens here, in place of [draft] source and its node",
    )
    add("--listen-fd", type=int, metavar="N", help="inherited listening socket")
    text = (
        "threads for products (default: OMP_NUM_THREADS, else this machine's cores, shared with "
        "what other nodes the cluster file puts on it)"
    )
    THREADS.add_to(parser, "--threads", "N", text)
    add("--retest", action="store_true", help=kept_results.HELP)
    text = f"new starts of a node that has crashed, within ten minutes (default: {RESTARTS})"
    NEW_STARTS.add_to(parser, "--restarts", "N", text, default=RESTARTS)
    add(
        "--supervised",
        action="store_true",
        help="stop at the end of stdin; report progress as JSON lines on stdout",
    )
    add(
        "--again",
        choices=get_args(Again),
        default="",
        help="said by the parent: how the process before this one has ended",
    )
    add(
        "--http",
        type=int,
        metavar="PORT",
        help="serve HTTP there: /health, /ready and /metrics, on the draft node OpenAI's interface "
        "as well (docs/reference/http.md)",
    )
    add("--http-host", default="127.0.0.1", metavar="HOST", help="default: 127.0.0.1")
    http_options.add_arguments(parser)
    log.add_arguments(parser)
    return parser


def run(argv: Sequence[str] | None) -> int:
    """The node, to its end: its exit code."""
    try:
        parser = build_parser()
        if "--supervised" in (sys.argv if argv is None else argv):
            parser.environment = {}  # its parent has read it
        arguments = parser.parse_args(argv)
    except UserError as error:
        sys.stderr.write(f"asyncspec-node: {error}\n")
        return 2
    pipe = sys.stdout if arguments.supervised else None
    reporter = Reporter(rank(arguments), pipe, log.read_arguments(arguments, LogTable()))
    return _exit_code(reporter, partial(_start, arguments, reporter))


def _exit_code(reporter: Reporter, work: Callable[[], int]) -> int:
    """What ``work`` returns; its errors are reported."""
    try:
        return work()
    except UserError as error:
        reporter.failed("user", str(error))
        return 2
    except AsyncSpecError as error:
        reporter.failed("cluster", str(error))
        return 1
    except Exception as error:
        reporter.log.exception("crashed")
        reporter.failed("cluster", f"{type(error).__name__}: {error}")
        return 1


def _start(arguments: argparse.Namespace, reporter: Reporter) -> int:
    if arguments.retest:
        kept_results.retest()
    config, node = load(arguments.config), rank(arguments)
    reporter.use(log.read_arguments(arguments, config.log))
    if arguments.role == "draft":
        config = _draft(arguments, config)
    else:
        _check_listed(arguments, config)
    resources.raise_file_limit()
    sock = _listen(arguments, config)
    listed = config.find(node)
    http = _http(arguments, None if listed is None else listed.http)
    if http is not None:
        http.options.keys.check_disk_cache(config.cache.disk_mib)
    host = sock.getsockname()[0] if listed is None else listed.host
    resources.set_threads(config, node, host, arguments.threads)

    supervisor: Supervisor | None = None

    def serve() -> int:
        from asyncspec.actor import loop
        from asyncspec_nodes.node import process

        how = {"supervised": arguments.supervised, "http": http, "file": arguments.config}
        again = arguments.again if supervisor is None else supervisor.again
        loop.run(process.serve(config, node, sock, reporter, again=again, **how))
        return 0

    if not SUPERVISES or arguments.supervised or not arguments.restarts:
        return serve()
    preload_model(config.target_of(node))
    closing = [sock.close] if http is None else [sock.close, http.sock.close]
    supervisor = Supervisor(arguments.restarts, reporter.log, closing)
    reporter.on_serving, reporter.on_hand = supervisor.serves, supervisor.in_hand
    return supervisor.run(partial(_exit_code, reporter, serve))


def _http(arguments: argparse.Namespace, listed: int | None) -> HttpSocket | None:
    """``listed``: the port in the cluster file. None without a port."""
    host, port = arguments.http_host, listed if arguments.http is None else arguments.http
    if port is None:
        return None
    if not 0 <= port < 65536:
        raise UserError(f"--http is {port}; it must be 0 to 65535")
    # A stage's probes reveal nothing of requests, and its metrics need a key or --public-metrics.
    options = http_options.read_arguments(arguments, host, closed=arguments.role != "draft")
    return HttpSocket(options, listen.bind(host, port, whose="--http-host and --http"))
