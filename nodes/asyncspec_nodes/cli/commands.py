"""The commands of ``asyncspec``. The module of a command is imported when that command is given."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from asyncspec_nodes.console.arguments import Parser
from asyncspec_nodes.console.interrupt import exit_on_interrupt

COMMANDS = {
    "run": "run prompts on a cluster of processes here",
    "chat": "talk with a model in the terminal, on a running service or cluster or a new one",
    "simulate": "run the same machines on a virtual clock, with a model of language and of costs",
    "memory": "what each stage of a model takes",
    "serve": "serve the OpenAI interface over HTTP, on a cluster started here or a running one",
    "up": "start a cluster that other machines join, and serve the OpenAI interface over HTTP",
    "join": "make this machine part of a cluster that asyncspec up has started",
    "plan": "plan which machine holds which layers, or (DiP-SD) which users are verified together",
    "policies": "list the policies",
    "record": "record a running cluster",
    "trace": "show a recorded run",
}
"""Help texts. The module of the same name has ``add_arguments(parser)`` and ``run(arguments)``,
which returns the exit code and raises ``AsyncSpecError``."""


def run(argv: Sequence[str] | None) -> int:
    """Run a command: its exit code. Raises ``AsyncSpecError``, and ``SystemExit`` as argparse."""
    with exit_on_interrupt():
        arguments = _parser().parse_args(argv)
    code: int = _module(arguments.command).run(arguments)
    return code


def _parser() -> Parser:
    parser = Parser(
        prog="asyncspec",
        description="Several small machines serve one large language model, fast and exactly.",
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="show program's version number and exit"
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=_CommandParser
    )
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, description=text)
    return parser


class _CommandParser(Parser):
    """Adds its arguments when it is to parse some."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        _module(self.prog.split()[-1]).add_arguments(self)
        return super().parse_known_args(args, namespace)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *args: object) -> None:
        from importlib.metadata import version

        sys.stdout.write(f"asyncspec {version('asyncspec')}\n")
        parser.exit()


def _module(command: str) -> Any:
    return import_module(f"asyncspec_nodes.cli.{command}")
