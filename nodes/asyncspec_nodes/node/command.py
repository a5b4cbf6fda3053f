"""``asyncspec-node``: its arguments, and what becomes of its errors.

Law of this file: nothing that imports torch is imported before the thread settings are made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from asyncspec.errors import AsyncSpecError, UserError
from asyncspec_nodes.cli import numbers
from asyncspec_nodes.cli.arguments import Parser
from asyncspec_nodes.cluster.config import load
from asyncspec_nodes.http import options as http_options
from asyncspec_nodes.http.options import HttpSocket
from asyncspec_nodes.node import cores, listen, place
from asyncspec_nodes.node.reports import Reporter


def _parser() -> Parser:
    parser = Parser(prog="asyncspec-node", description="Run one node of a cluster.")
    place.add_arguments(parser)
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads for products (default: OMP_NUM_THREADS, else this machine's cores, shared "
        "with what other nodes the cluster file puts on it)",
    )
    parser.add_argument(
        "--supervised",
        action="store_true",
        help="stop at the end of stdin; report progress as JSON lines on stdout",
    )
    parser.add_argument(
        "--http",
        type=int,
        metavar="PORT",
        help="draft node: serve the OpenAI interface there (docs/http.md)",
    )
    parser.add_argument(
        "--http-host", default="127.0.0.1", metavar="HOST", help="default: 127.0.0.1"
    )
    http_options.add_arguments(parser)
    return parser


def run(argv: Sequence[str] | None) -> int:
    """The node, to its end: its exit code."""
    arguments = _parser().parse_args(argv)
    reporter = Reporter(place.rank(arguments), sys.stdout if arguments.supervised else None)
    try:
        _serve(arguments, reporter)
    except UserError as error:
        reporter.trouble("user", str(error))
        return 2
    except AsyncSpecError as error:
        reporter.trouble("cluster", str(error))
        return 1
    except Exception as error:
        reporter.log.exception("crashed")
        reporter.trouble("cluster", f"{type(error).__name__}: {error}")
        return 1
    return 0


def _serve(arguments: argparse.Namespace, reporter: Reporter) -> None:
    numbers.THREADS.check("--threads", arguments.threads)
    at = place.take(arguments, load(arguments.config))
    http = None if arguments.http is None else _http(arguments, arguments.role)
    cores.set_threads(at.config, at.rank, at.host, arguments.threads)
    from asyncspec.actor import loop
    from asyncspec_nodes.node.process import serve

    supervised = arguments.supervised
    loop.run(serve(at.config, at.rank, at.sock, reporter, supervised=supervised, http=http))


def _http(arguments: argparse.Namespace, role: str) -> HttpSocket:
    if role != "draft":
        raise UserError(f"a {role} node does not serve HTTP; give --http to the draft node")
    host, port = arguments.http_host, arguments.http
    if not 0 <= port < 65536:
        raise UserError(f"--http is {port}; it must be 0 to 65535")
    options = http_options.read_arguments(arguments, host)
    return HttpSocket(options, listen.bind(host, port, whose="--http-host and --http"))
