"""What arguments of several benchmarks have in common."""

from __future__ import annotations

import argparse

from asyncspec.errors import UserError


def check_counts(options: argparse.Namespace, *names: str) -> None:
    """Raise ``UserError`` where one of these arguments was given, and is less than 1."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}; give at least 1")
