"""The arguments that make the nodes of a local cluster as slow as other devices."""

from __future__ import annotations

import argparse

from asyncspec_nodes.cli import numbers
from asyncspec_nodes.cli.arguments import Parser
from asyncspec_nodes.cluster.config_tables import PaceTable

NAMES = ("stage_seconds", "plateau", "row_seconds", "draft_seconds", "call_seconds")


def add_arguments(parser: Parser) -> None:
    """Named as in ``asyncspec simulate``."""
    group = parser.add_argument_group(
        "slower devices",
        "for experiments: the real work is done, and what is left of these times is waited for",
    )
    add = group.add_argument
    add("--stage-seconds", type=float, metavar="S", help="a pass of a stage takes at least that")
    add("--plateau", type=int, metavar="ROWS", help="rows that cost no more than one (default: 16)")
    add("--row-seconds", type=float, metavar="S", help="each row past the plateau")
    add("--draft-seconds", type=float, metavar="S", help="a draft pass: one level of a tree")
    add("--call-seconds", type=float, metavar="S", help="every call of the draft, besides")


def given(arguments: argparse.Namespace) -> str | None:
    """The first of them that was given, as the user writes it."""
    names = [name for name in NAMES if getattr(arguments, name) is not None]
    return numbers.option(names[0]) if names else None


def read_arguments(arguments: argparse.Namespace) -> tuple[PaceTable | None, PaceTable | None]:
    """The pace of every stage and of what drafts; None where nothing was asked. Raises
    ``UserError``."""
    for name in NAMES:
        bounds = numbers.COUNT if name == "plateau" else numbers.SECONDS
        bounds.check(numbers.option(name), getattr(arguments, name))
    stage = {
        "seconds": arguments.stage_seconds,
        "plateau": arguments.plateau,
        "row_seconds": arguments.row_seconds,
    }
    draft = {"level_seconds": arguments.draft_seconds, "call_seconds": arguments.call_seconds}
    return _table(stage), _table(draft)


def _table(keys: dict[str, float | None]) -> PaceTable | None:
    given = {name: value for name, value in keys.items() if value is not None}
    return PaceTable(**given) if given else None  # type: ignore[arg-type]
