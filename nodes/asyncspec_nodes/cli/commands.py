"""The commands of ``asyncspec``. The module of a command is imported when that command is given."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from asyncspec_nodes.console.arguments import Parser, Version
from asyncspec_nodes.console.interrupt import exit_on_interrupt

COMMANDS = {
    "demo": "a plain pipeline and flow side by side, on four emulated computers",
    "run": "run prompts on a cluster of processes here",
    "chat": "talk with a model in the terminal, on a running service or cluster or a new one",
    "simulate": "run the same machines on a virtual clock, with a model of language and of costs",
    "memory": "what each stage of a model takes",
    "serve": "serve the OpenAI interface over HTTP, on a cluster started here or a running one",
    "up": "start a cluster that other machines join, and serve the OpenAI interface over HTTP",
    "join": "make this machine part of a cluster that asyncspec up has started",
    "plan": "plan which machine holds which layers, or (DiP-SD) which users are verified together",
    "policies": "list the policies",
    "check": "check a cluster file, and what it names on this machine",
    "completion": "print a shell's completion of these commands",
    "drain": "let a running cluster finish its requests and take no new ones",
    "record": "record a running cluster",
    "trace": "show a recorded run",
}
"""Help texts. The module of the same name has ``add_arguments(parser)`` and ``run(arguments)``,
which returns the exit code and raises ``AsyncSpecError``."""


def run(argv: Sequence[str] | None) -> int:
    """Run a command: its exit code. Raises ``AsyncSpecError``, and ``SystemExit`` as argparse."""
    with exit_on_interrupt():
        arguments = build_parser().parse_args(argv)
    code: int = _module(arguments.command).run(arguments)
    return code


def build_parser(*, complete: bool = False) -> Parser:
    """``asyncspec``; ``complete``: with the arguments of every command, whose modules are imported
    otherwise only when they are given."""
    parser = Parser(
        prog="asyncspec",
        description="Several small machines serve one large language model, fast and exactly.",
    )
    parser.add_argument("--version", action=Version)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=_CommandParser
    )
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if complete:
            command.complete()
    return parser


class _CommandParser(Parser):
    """Adds its arguments when it is to parse some."""

    def complete(self) -> None:
        """Add the command's arguments."""
        self.add_argument("--version", action=Version)
        _module(self.prog.split()[-1]).add_arguments(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.complete()
        return super().parse_known_args(args, namespace)


def _module(command: str) -> Any:
    return import_module(f"asyncspec_nodes.cli.{command}")
