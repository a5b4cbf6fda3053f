"""``asyncspec plan``: which layers go where, and which users are verified together."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from asyncspec_nodes.console.arguments import Parser

PLANNERS = {
    "layers": "which device holds which layers of a target, and how fast that will be",
    "dipsd": "DiP-SD: who is verified together when many users draft for one target",
}
"""Help texts. ``planning.NAME`` has ``add_arguments(parser)`` and ``run(arguments)``."""


def add_arguments(parser: Parser) -> None:
    planners = parser.add_subparsers(
        dest="planner", required=True, metavar="layers|dipsd", parser_class=Parser
    )
    for name, text in PLANNERS.items():
        _module(name).add_arguments(planners.add_parser(name, help=text, description=text))


def run(arguments: argparse.Namespace) -> int:
    code: int = _module(arguments.planner).run(arguments)
    return code


def _module(name: str) -> Any:
    return import_module(f"asyncspec_nodes.cli.planning.{name}")
