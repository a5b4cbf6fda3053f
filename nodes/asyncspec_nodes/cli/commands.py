"""The commands of ``asyncspec``: those that installed packages register under the entry point group
``asyncspec.commands``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from asyncspec.registry import Registry, importing
from asyncspec_nodes.console.arguments import Parser, Version, print_notice
from asyncspec_nodes.console.interrupt import exit_on_interrupt


class Command(NamedTuple):
    """A command of ``asyncspec``."""

    help: str
    # A module with ``add_arguments(parser)`` and ``run(arguments)``, which returns the exit code
    # and raises ``AsyncSpecError``. It is imported when the command is given.
    module: str


COMMANDS: Registry[Command] = Registry("asyncspec.commands", "command", Command)
"""The installed commands."""

FIRST = ("demo", "run", "chat", "serve", "up", "join")
"""The first commands of the help; the others follow by their names."""

RUN = Command("run prompts on a cluster of processes here", "asyncspec_nodes.cli.run")
SERVE = Command(
    "serve the OpenAI interface over HTTP, on a cluster started here or a running one",
    "asyncspec_nodes.cli.serve",
)
PLAN = Command(
    "plan which machine holds which layers, or (DiP-SD) which users are verified together",
    "asyncspec_nodes.cli.plan",
)
STATUS = Command(
    "show the services in the background, or a running cluster's nodes",
    "asyncspec_nodes.cli.status",
)
DRAIN = Command(
    "let a running cluster finish its requests and take no new ones", "asyncspec_nodes.cli.drain"
)


def run(argv: Sequence[str] | None) -> int:
    """Run a command: its exit code. Raises ``AsyncSpecError``, and ``SystemExit`` as argparse."""
    words = sys.argv[1:] if argv is None else argv
    with exit_on_interrupt():
        parser = build_parser()
        if not words:
            parser.print_help()
            return 0
        arguments = parser.parse_args(words)
        arguments.command_line = tuple(words)
    code: int = module_of(arguments.command).run(arguments)
    return code


def build_parser(*, complete: bool = False) -> Parser:
    """``asyncspec``; ``complete``: with the arguments of every command, whose modules are imported
    otherwise only when they are given. A command that cannot be imported is a notice."""
    parser = Parser(
        prog="asyncspec",
        description="Several small machines serve one large language model, fast and exactly.",
    )
    parser.add_argument("--version", action=Version)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=_CommandParser
    )
    usable, problems = COMMANDS.usable()
    for problem in problems:
        print_notice(problem)
    for name in in_order(usable):
        text = usable[name].help
        command = commands.add_parser(name, help=text, description=text)
        if complete:
            command.complete()
    return parser


def in_order(names: Iterable[str]) -> list[str]:
    """Names of commands in the order of the help, without those that are a second word."""
    rest = sorted(name for name in names if "." not in name)
    first = [name for name in FIRST if name in rest]
    return first + [name for name in rest if name not in first]


class _CommandParser(Parser):
    """Adds its arguments when it is to parse some."""

    def complete(self) -> None:
        """Add the command's arguments."""
        self.add_argument("--version", action=Version)
        module_of(self.prog.split()[-1]).add_arguments(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.complete()
        return super().parse_known_args(args, namespace)


def module_of(name: str) -> Any:
    """A command's module. Raises ``UserError`` where another package's cannot be imported."""
    command = COMMANDS[name]
    with importing(COMMANDS.plugin(name), f"command {name!r} ({command.module})"):
        return import_module(command.module)
