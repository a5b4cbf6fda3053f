"""Command-line arguments: argparse with one-line errors (exit code 2), bounds of numbers."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import NamedTuple, NoReturn

from asyncspec.core.errors import UserError
from asyncspec_nodes.console.hosts import is_host


class Parser(argparse.ArgumentParser):
    """Without usage dump and abbreviated options."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: {message}\n")
        sys.exit(2)


def host_and_port(option: str, text: str) -> tuple[str, int]:
    """Parse an option of the form HOST:PORT. Raises ``UserError``."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not is_host(host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"{option} {text} is not HOST:PORT")
    return host, int(port)


def print_notice(line: str) -> None:
    """A line on stderr; ignored where the terminal has closed."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"asyncspec: {line}\n")


# --- Bounds of numbers. The upper ones lie far beyond any use; they keep sums and messages from
# overflowing.


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
            most = str(self.most) if isinstance(self.most, int) else f"{self.most:g}"
            raise UserError(f"{option} is {shown}; it must be at most {most}")
        # Also refuses NaN.
        if not (value > self.least if self.above else value >= self.least):
            raise UserError(f"{option} is {shown}; it must be {self._rule}")

    @property
    def _rule(self) -> str:
        if self.above:
            return f"above {self.least:g}"
        return f"at least {self.least:g}" if self.least else "0 or more"


LARGE = 1_000_000

SECONDS = Bounds(0.0, 1e6)
"""Eleven days."""

SOME_SECONDS = Bounds(0.0, 1e6, above=True)
MILLISECONDS = Bounds(0.0, 1e9)
SOME_MILLISECONDS = Bounds(0.0, 1e9, above=True)
COUNT = Bounds(1, LARGE)
THREADS = Bounds(1, 1024)
POSITIONS = Bounds(1, 1_000_000_000)
"""Of a context."""

NODES = Bounds(0, 1_000_000_000)
"""Of trees in flight."""

BYTES = Bounds(1, 1 << 40)
"""In memory at once."""

SEED = Bounds(0, (1 << 63) - 1)
MEGABITS = Bounds(0.0, 1e9)
MIN_MEGABITS = Bounds(1e-3, 1e9)
FACTOR = Bounds(0.0, 1e6, above=True)


def option(name: str) -> str:
    """An argument's name as the user writes it."""
    return f"--{name.replace('_', '-')}"
