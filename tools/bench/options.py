"""What arguments of several benchmarks have in common."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from asyncspec.errors import UserError
from asyncspec.policy import POLICIES


def check_counts(options: argparse.Namespace, *names: str) -> None:
    """Raise ``UserError`` where one of these arguments was given, and is less than 1."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}; give at least 1")


def check_policies(names: Iterable[str]) -> None:
    """Raise ``UserError`` for a policy there is not, or one that needs no token source."""
    for name in names:
        if problem := POLICIES.problem(name):
            raise UserError(problem)
        if not POLICIES[name].drafts:
            raise UserError(f"policy {name} needs no token source; compare others")
