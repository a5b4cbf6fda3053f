"""``asyncspec join``: this machine becomes part of a cluster that ``asyncspec up`` has started."""

from __future__ import annotations

import argparse
import os
import socket
import sys

from setproctitle import getproctitle, setproctitle

from asyncspec.backend import kept_results
from asyncspec.backend.registry import backend_of
from asyncspec.backend.threads import set_thread_count
from asyncspec.core.errors import UserError
from asyncspec.core.paths import expanded
from asyncspec_nodes.console import bounds
from asyncspec_nodes.console.arguments import Parser, host_and_port, print_notice
from asyncspec_nodes.console.hosts import address, is_host
from asyncspec_nodes.console.output import service_stderr
from asyncspec_nodes.node.resources import raise_file_limit
from asyncspec_nodes.plugins.join.agent import WAIT_SECONDS, AgentOptions
from asyncspec_nodes.plugins.join.own_machine import join_until_signal
from asyncspec_nodes.plugins.join.token import Token, read

TOKEN_VARIABLE = "ASYNCSPEC_TOKEN"
MEMORY = bounds.Bounds(0.0, 1e6, above=True)
SPEED = bounds.Bounds(0.0, 1e9, above=True)
WAIT = bounds.Bounds(1.0, 1e6)


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    text = f"as asyncspec up prints it, or - for stdin (default: {TOKEN_VARIABLE})"
    add("token", metavar="TOKEN", nargs="?", help=text)
    add("--retest", action="store_true", help=kept_results.HELP)
    add("--address", metavar="HOST:PORT", help="where the cluster is, in place of what TOKEN says")
    add(
        "--target",
        metavar="DIR|GGUF",
        help="the target on this machine (default: as the cluster names it; a directory is fetched "
        "from there, the layers of this machine only)",
    )
    add_machine_arguments(parser)
    text = "first of four ports that stages listen on; HOST:0: any (default: 0.0.0.0:0)"
    add("--listen", metavar="HOST:PORT", default="0.0.0.0:0", help=text)
    text = f"for the cluster, at first and after a loss (default: {WAIT_SECONDS:g})"
    WAIT.add_to(parser, "--wait", "S", text, default=WAIT_SECONDS)


def add_machine_arguments(parser: Parser) -> None:
    """What a machine is, as ``asyncspec up`` has them, too."""
    add = parser.add_argument
    add("--name", metavar="NAME", default=socket.gethostname(), help="default: the host's name")
    MEMORY.add_to(parser, "--memory-gib", "GIB", "for stages (default: 90 %% of what is free)")
    text = "GB a second of weights that passes read (default: measured)"
    SPEED.add_to(parser, "--gb-per-second", "GB", text)
    text = "the address that other machines use, and the first of its ports, where that differs"
    add("--advertise", metavar="HOST[:PORT]", default="", help=text)
    if not any(action.dest == "threads" for action in parser._actions):
        bounds.THREADS.add_to(parser, "--threads", "N", "threads of each stage's products")


def read_token(argument: str | None) -> Token:
    """The argument, which other users of this machine then see no longer, or from stdin or the
    environment. Raises ``UserError``."""
    if argument == "-":
        return read(sys.stdin.readline().strip())
    if argument:
        setproctitle(getproctitle().replace(argument, "TOKEN"))
    text = argument or os.environ.get(TOKEN_VARIABLE, "")
    if not text:
        raise UserError(
            f"give the TOKEN that asyncspec up prints, - to read it from stdin, or {TOKEN_VARIABLE}"
        )
    return read(text)


def read_listen(text: str) -> tuple[str, int]:
    """HOST:PORT, of which the port may be 0. Raises ``UserError``."""
    host, _, port = text.rpartition(":")
    if port == "0" and is_host(host):
        return host.strip("[]"), 0
    return host_and_port("--listen", text)


def read_advertise(text: str) -> tuple[str, int]:
    """HOST or HOST:PORT; port 0: none is given. Raises ``UserError``."""
    name = text.strip("[]")
    if not text or address(name) is not None or (":" not in text and is_host(text)):
        return name, 0
    return host_and_port("--advertise", text)


def memory(arguments: argparse.Namespace) -> int | None:
    """Bytes of ``--memory-gib``."""
    gib = arguments.memory_gib
    return None if gib is None else int(gib * bounds.GIB)


def speed(arguments: argparse.Namespace) -> float | None:
    """Bytes a second of ``--gb-per-second``."""
    gigabytes = arguments.gb_per_second
    return None if gigabytes is None else gigabytes * bounds.GB


def run(arguments: argparse.Namespace) -> int:
    """Until a signal. Raises ``AsyncSpecError``."""
    token = read_token(arguments.token)
    raise_file_limit()
    target = arguments.target
    if target is not None:
        backend_of(target).inspect(target)
        if os.path.exists(path := expanded(target)):
            target = str(path.absolute())
    options = AgentOptions(
        arguments.name,
        advertise=read_advertise(arguments.advertise),
        address=None
        if arguments.address is None
        else host_and_port("--address", arguments.address),
        target=target,
        memory=memory(arguments),
        speed=speed(arguments),
        wait_seconds=arguments.wait,
    )
    if arguments.retest:
        kept_results.retest()
    if arguments.threads is not None:
        set_thread_count(arguments.threads)
    with service_stderr():
        join_until_signal(token, options, read_listen(arguments.listen), print_notice)
    return 0
