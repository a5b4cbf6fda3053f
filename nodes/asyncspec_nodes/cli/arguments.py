"""argparse with this project's manners: a mistake is one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import NoReturn

from asyncspec.errors import UserError
from asyncspec_nodes.cluster.hosts import is_host


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


def say(line: str) -> None:
    """A line for whoever looks at stderr, in the voice of the command."""
    with contextlib.suppress(OSError):  # the terminal has closed, and nobody looks
        sys.stderr.write(f"asyncspec: {line}\n")
