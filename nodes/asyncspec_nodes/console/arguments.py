"""argparse with this project's manners: a mistake is one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import NamedTuple, NoReturn

from asyncspec.core.errors import UserError
from asyncspec_nodes.console.hosts import is_host


class Parser(argparse.ArgumentParser):
    """No usage dump, no guessing of abbreviated options."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """See ``argparse``."""
        sys.stderr.write(f"{self.prog}: {message}\n")
        sys.exit(2)


def host_and_port(option: str, text: str) -> tuple[str, int]:
    """What an option of the form HOST:PORT says. Raises ``UserError``."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not is_host(host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"{option} {text} is not HOST:PORT")
    return host, int(port)


def print_notice(line: str) -> None:
    """A line for whoever looks at stderr, in the voice of the command."""
    with contextlib.suppress(OSError):  # the terminal has closed, and nobody looks
        sys.stderr.write(f"asyncspec: {line}\n")


# --- The numbers a user may give: what is too little and too much, in one place.
# What is too much is far beyond any use; it is refused because sums of it overflow, on the wire
# or in the arithmetic, and what is said then is no help to anybody.


class Bounds(NamedTuple):
    """Numbers from ``least`` to ``most``; with ``above``, ``least`` itself is too little."""

    least: float
    most: float
    above: bool = False

    def check(self, option: str, value: float | None) -> None:
        """``option`` as the user writes it. What was not given is fine. Raises ``UserError``."""
        if value is None:
            return
        shown = str(value) if isinstance(value, int) else f"{value:g}"
        if value > self.most:
            most = str(self.most) if isinstance(self.most, int) else f"{self.most:g}"
            raise UserError(f"{option} is {shown}; it must be at most {most}")
        # Neither is what is not a number.
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
