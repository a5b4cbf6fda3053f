"""``asyncspec keys``: the authority, certificates and keys of a cluster with a cluster file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from asyncspec.core.errors import UserError
from asyncspec_nodes.console.arguments import Parser
from asyncspec_nodes.console.interrupt import exit_on_interrupt


def add_arguments(parser: Parser) -> None:
    parser.usage = "asyncspec keys DIRECTORY [NAME[=ROLE[,ROLE]] ...] [--revoke [NAME ...]]"
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIRECTORY",
        help="is made where it does not exist, with an authority: ca.pem and ca.key",
    )
    parser.add_argument(
        "holders",
        nargs="*",
        metavar="NAME[=ROLE[,ROLE]]",
        help="gets NAME.pem and NAME.key. ROLE: node:RANK (that rank only; draft node d > 0 has "
        "rank 1000 + d), node (any rank: the default), client (may ask), operator (may ask and "
        "record traces)",
    )
    parser.add_argument(
        "--revoke",
        nargs="*",
        action="extend",
        metavar="NAME",
        help="write crl.pem, which goes to every machine that names it in [security] crl",
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises ``UserError``."""
    with exit_on_interrupt():
        from asyncspec_nodes.plugins.join import key_folder
    folder: Path = arguments.directory
    if arguments.revoke is not None:
        if arguments.holders:
            raise UserError("keys are made and revoked by two commands")
        count = key_folder.revoke(folder, arguments.revoke)
        sys.stdout.write(f"{folder / key_folder.LIST}: {count} revoked in all\n")
        return 0
    holders = [key_folder.Holder.read(text) for text in arguments.holders]
    names = [holder.name for holder in holders]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{twice} is named twice; give its roles at once: {twice}=ROLE,ROLE")
    key_folder.issue(folder, holders)
    for name, roles in holders:
        sys.stdout.write(f"{folder / name}.pem and .key: {', '.join(roles)}\n")
    sys.stdout.write(
        f"{folder / key_folder.CA_KEY} makes members: keep it off the machines. Each gets ca.pem "
        "and its own two files\n"
    )
    return 0
