"""Bounds and units of numbers that users give, and options for them."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from asyncspec.core.errors import UserError

GIB = 1 << 30
GB = 1e9
BYTES_PER_MEGABIT = 125_000.0


class Bounds(NamedTuple):
    """Numbers from ``least`` to ``most``; with ``above``, ``least`` itself is excluded."""

    least: float
    most: float
    above: bool = False

    def check(self, option: str, value: float | None) -> None:
        """``option`` as the user writes it; None is accepted. Raises ``UserError``."""
        if value is None:
            return
        shown = str(value) if isinstance(value, int) else f"{value:g}"
        if value > self.most:
            highest = str(self.most) if isinstance(self.most, int) else f"{self.most:g}"
            raise UserError(f"{option} is {shown}; it must be at most {highest}")
        # Also refuses NaN.
        if not (value > self.least if self.above else value >= self.least):
            above = f"above {self.least:g}"
            least = f"at least {self.least:g}" if self.least else "0 or more"
            raise UserError(f"{option} is {shown}; it must be {above if self.above else least}")

    def add_to(
        self,
        parser: argparse._ActionsContainer,
        name: str,
        metavar: str,
        help: str,
        *,
        short: str = "",
        **how: Any,
    ) -> None:
        """Add an option for a number within the bounds, ``short`` beside its name; for any other
        ``parse_args`` raises ``UserError``. ``how``: as for ``add_argument``."""
        check, kind = self.check, type(self.least)

        class BoundedNumber(argparse.Action):
            def __call__(self, parser: Any, namespace: Any, value: Any, option: Any = None) -> None:
                check(option, value)
                setattr(namespace, self.dest, value)

        names = (short, name) if short else (name,)
        parser.add_argument(
            *names, type=kind, action=BoundedNumber, metavar=metavar, help=help, **how
        )


# The upper bounds lie far beyond any use; they keep sums and messages from overflowing.
LARGE = 1_000_000
COUNT = Bounds(1, LARGE)
THREADS = Bounds(1, 1024)
NEW_STARTS = Bounds(0, LARGE)
GPU_LAYERS = Bounds(0, 100_000)
SEED = Bounds(0, (1 << 63) - 1)
CHANCE = Bounds(0.0, 1.0)
SECONDS = Bounds(0.0, 1e6)
"""Up to eleven days."""

SOME_SECONDS = Bounds(0.0, 1e6, above=True)
MILLISECONDS = Bounds(0.0, 1e9)
SOME_MILLISECONDS = Bounds(0.0, 1e9, above=True)
POSITIONS = Bounds(1, 1_000_000_000)
"""Positions of a context."""

NODES = Bounds(0, 1_000_000_000)
"""Nodes of trees in flight."""

BYTES = Bounds(1, 1 << 40)
"""In memory at once."""
