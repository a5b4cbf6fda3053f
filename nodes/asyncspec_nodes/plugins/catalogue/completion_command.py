"""``asyncspec completion``: a script for the user's shell, printed."""

from __future__ import annotations

import argparse
import sys

import shtab

from asyncspec_nodes.console.arguments import Parser


def add_arguments(parser: Parser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=shtab.SUPPORTED_SHELLS, help="bash, ...")


def run(arguments: argparse.Namespace) -> int:
    from asyncspec_nodes.cli.commands import build_parser
    from asyncspec_nodes.node.command import build_parser as build_node_parser

    for parser in (build_parser(complete=True), build_node_parser()):
        sys.stdout.write(f"{shtab.complete(parser, shell=arguments.shell)}\n")
    return 0
