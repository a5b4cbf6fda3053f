"""What arguments of several benchmarks have in common: which numbers, which policies, how rows are
printed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence

from asyncspec.core.errors import UserError
from asyncspec.policy.registry import POLICIES
from asyncspec_nodes.console.arguments import option
from asyncspec_nodes.console.bounds import LARGE, Bounds

SEVERAL = Bounds(2, LARGE)
"""A rate is of what comes after the first, and quartiles are of two at least."""

TEMPERATURE = Bounds(0.0, 1e6)


def check_numbers(options: argparse.Namespace, **bounds: Bounds) -> None:
    """Raise ``UserError`` where one of these arguments, or one of its values, was given and is out
    of its bounds."""
    for name, allowed in bounds.items():
        given = getattr(options, name)
        for value in given if isinstance(given, list | tuple) else (given,):
            allowed.check(option(name), value)


def print_rows(options: argparse.Namespace, rows: Sequence[Mapping[str, object]]) -> None:
    """A line each, or one JSON list with ``--json``."""
    if options.json:
        sys.stdout.write(json.dumps(rows) + "\n")
        return
    for row in rows:
        sys.stdout.write(", ".join(f"{name} {value}" for name, value in row.items()) + "\n")


def check_policies(names: Iterable[str]) -> None:
    """Raise ``UserError`` for a policy there is not, or one that needs no token source."""
    for name in names:
        if problem := POLICIES.problem(name):
            raise UserError(problem)
        if not POLICIES[name].uses_draft:
            raise UserError(f"policy {name} needs no token source; compare others")
