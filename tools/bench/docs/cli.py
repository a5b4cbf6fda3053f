"""The reference of the command line, from the parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import import_module

from asyncspec_nodes.cli.commands import COMMANDS, in_order
from asyncspec_nodes.console.arguments import Parser
from asyncspec_nodes.node import command as node
from tools.bench.docs.comments import linked

SHARED = "shared"
"""Argument of the block with the options that several commands have alike."""


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Every installed command with its arguments."""
    found: dict[str, argparse.ArgumentParser] = {}
    for name in in_order(COMMANDS):
        command = COMMANDS[name]
        parser = Parser(prog=f"asyncspec {name}", description=command.help)
        import_module(command.module).add_arguments(parser)
        found |= _with_words(parser) or {f"asyncspec {name}": parser}
    found["asyncspec-node"] = node.build_parser()
    return found


def _with_words(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands that a second word tells apart, as in ``asyncspec plan layers``."""
    actions = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    return {one.prog: one for action in actions for one in action.choices.values()}


def reference(argument: str) -> str:
    """The options of one command that it does not share with others; or those that are shared."""
    commands = parsers()
    owners: dict[str, list[str]] = {}
    for name, parser in commands.items():
        for line in _lines(parser):
            owners.setdefault(line, []).append(name)
    if argument == SHARED:
        return linked(_shared(owners))
    parser = commands[argument]
    own = [line for line in _lines(parser) if len(owners[line]) == 1]
    text = [_sentence(parser.description or "")]
    if own:
        text.append("\n".join(f"- {line}" for line in own))
    if len(own) < len(list(_lines(parser))):
        text.append("And [shared options](#shared-options).")
    return linked("\n\n".join(text))


def _shared(owners: dict[str, list[str]]) -> str:
    groups: dict[tuple[str, ...], list[str]] = {}
    for line, names in owners.items():
        if len(names) > 1:
            groups.setdefault(tuple(names), []).append(line)
    parts = []
    for owning, lines in groups.items():
        heading = ", ".join(f"`{name.removeprefix('asyncspec ')}`" for name in owning)
        parts.append(f"{heading}:\n\n" + "\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts)


def _lines(parser: argparse.ArgumentParser) -> Iterator[str]:
    """One line for each argument: how it is written, and its help text."""
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        written = _written(action)
        text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
        yield f"`{written}`" + (f": {' '.join(text.split())}" if text else "")


def _written(action: argparse.Action) -> str:
    metavar = action.metavar
    if action.choices is not None and metavar is None:
        metavar = "|".join(map(str, action.choices))
    if not action.option_strings:
        return str(metavar or action.dest)
    names = ", ".join(action.option_strings)
    if action.nargs == 0:
        return names
    return f"{names} {metavar or action.dest.upper()}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."
