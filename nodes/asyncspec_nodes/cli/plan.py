"""``asyncspec plan``: which layers go where, and which users are verified together."""

from __future__ import annotations

import argparse

from asyncspec_nodes.cli.commands import COMMANDS, module_of
from asyncspec_nodes.console.arguments import Parser

PREFIX = "plan."
"""Name of an entry point whose command is a second word, as ``plan.layers`` is ``plan layers``."""


def add_arguments(parser: Parser) -> None:
    """Arguments of every installed planner's command."""
    names = [name for name in COMMANDS if name.startswith(PREFIX)]
    planners = parser.add_subparsers(
        dest="planner",
        required=True,
        metavar="|".join(name.removeprefix(PREFIX) for name in names),
        parser_class=Parser,
    )
    for name in names:
        text = COMMANDS[name].help
        planner = planners.add_parser(name.removeprefix(PREFIX), help=text, description=text)
        module_of(name).add_arguments(planner)


def run(arguments: argparse.Namespace) -> int:
    """Plan; the exit code."""
    code: int = module_of(PREFIX + arguments.planner).run(arguments)
    return code
