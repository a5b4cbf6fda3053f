"""Command-line arguments: argparse with one-line errors (exit code 2)."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from asyncspec.core.errors import UserError
from asyncspec_nodes.console.hosts import is_host


class Parser(argparse.ArgumentParser):
    """Without usage dump and abbreviated options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def option(name: str) -> str:
    """An argument's name as the user writes it."""
    return f"--{name.replace('_', '-')}"


def given(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The values of those of the named arguments that the command has and the user has given."""
    values = {name: getattr(arguments, name, None) for name in names}
    return {name: v for name, v in values.items() if v is not None and v is not False}


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
