"""The commands of ``asyncspec``; each one's modules are imported when it is asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from asyncspec_nodes.console.arguments import Parser
from asyncspec_nodes.console.interrupt import exit_on_interrupt

INTRODUCTION = "Several small machines serve one large language model, fast and exactly."


class Command(NamedTuple):
    """What one is, and where; the modules are of this package."""

    text: str
    # Has ``add_arguments(parser)``.
    options: str
    # Has ``run(arguments)``, the whole command, which returns its exit code and raises
    # ``AsyncSpecError``.
    runs: str


COMMANDS = {
    "run": Command("run prompts on a cluster of processes here", "run_options", "run"),
    "simulate": Command(
        "run the same machines on a virtual clock, with a model of language and of costs",
        "simulate_options",
        "simulate",
    ),
    "memory": Command("what each stage of a model takes", "memory", "memory"),
    "serve": Command(
        "serve the OpenAI interface over HTTP, on a cluster of processes here or a running one",
        "serve_options",
        "serve",
    ),
    "plan": Command(
        "plan who is verified together when many users draft for one target",
        "plan.options",
        "plan.command",
    ),
    "policies": Command("list the policies", "policies", "policies"),
    "record": Command("record a running cluster", "record", "record"),
    "trace": Command("show a recorded run", "trace", "trace"),
}


def run(argv: Sequence[str] | None) -> int:
    """One of them. Exit code; raises ``AsyncSpecError``, and ``SystemExit`` as argparse does."""
    with exit_on_interrupt():
        arguments = _parser().parse_args(argv)
        command = _module(COMMANDS[arguments.command].runs)
    code: int = command.run(arguments)
    return code


def _parser() -> Parser:
    parser = Parser(prog="asyncspec", description=INTRODUCTION)
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="show program's version number and exit"
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=_CommandParser
    )
    for name, command in COMMANDS.items():
        added = commands.add_parser(name, help=command.text, description=command.text)
        added.options = command.options
    return parser


class _CommandParser(Parser):
    """It knows its arguments when it is to parse some."""

    options = ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See ``argparse``."""
        _module(self.options).add_arguments(self)
        return super().parse_known_args(args, namespace)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *args: object) -> None:
        from importlib.metadata import version

        sys.stdout.write(f"asyncspec {version('asyncspec')}\n")
        parser.exit()


def _module(name: str) -> ModuleType:
    return import_module(f"asyncspec_nodes.cli.{name}")
