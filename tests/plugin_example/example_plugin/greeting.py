"""``asyncspec example-greet NAME``."""

from __future__ import annotations

import argparse
import sys

from asyncspec_nodes.cli.commands import Command
from asyncspec_nodes.console.arguments import Parser

GREET = Command("greet somebody", __name__)


def add_arguments(parser: Parser) -> None:
    """Arguments of ``example-greet``."""
    parser.add_argument("name", metavar="NAME", help="whom to greet")


def run(arguments: argparse.Namespace) -> int:
    """Print the greeting."""
    sys.stdout.write(f"Hello, {arguments.name}\n")
    return 0
