"""Errors of asyncspec, by the side at fault, and what msgspec says of a user's input.

AsyncSpecError
├── UserError        a wrong argument, file or setting: one line, exit code 2, no traceback
│   └── CheckpointError   a model directory that is missing, broken or cannot work here
└── ClusterError     a node, link or device failed while we ran: one line, exit code 1
    └── FetchError        a model was not fetched: its name or the network; a command exits with 2
(ProtocolError, of peers and of our own machines, is in ``asyncspec_protocol.errors``.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:  # commands are interruptible, and --help is there, before msgspec is imported
    import msgspec


class AsyncSpecError(Exception):
    """Base of the package's errors; the text is a sentence for a person."""


class UserError(AsyncSpecError):
    """A mistake of the user; the text says what to change."""


class CheckpointError(UserError):
    """A checkpoint is missing, broken, or has a feature that cannot work."""


class ClusterError(AsyncSpecError):
    """Something outside this process failed."""


class FetchError(ClusterError):
    """A model cannot be fetched: a node may try again, a command's user names another one."""


class AddressError(ClusterError):
    """This machine does not have an address: a node may try again, as while a machine starts; a
    command's user names another one."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raises ``UserError`` where ``what``, a file, cannot be read inside."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {what}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"cannot read {what}: it is not UTF-8 text") from None


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Raises ``UserError`` where ``what``, a file, cannot be written inside."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {what}: {error.strerror or error}") from None


def first_line(error: BaseException) -> str:
    """The first line of an error's text; its type where it has none."""
    return (str(error).strip() or type(error).__name__).split("\n")[0]


class InputProblem(NamedTuple):
    """Why a file, an option or a request does not fit its struct."""

    kind: Literal["unknown", "missing", "invalid"]
    # Path of the field, as in ``node[0].port``; empty: the whole input.
    where: str
    # Why a value is invalid, as in ``expected int <= 65535``.
    reason: str = ""

    @staticmethod
    def of(error: msgspec.ValidationError) -> InputProblem:
        """Parse msgspec's message, as in "Expected `int` <= 65535 - at `$.node[0].port`"."""
        text, _, place = str(error).partition(" - at `$")
        where = place.removeprefix(".").removesuffix("`")
        if field := re.fullmatch(r"Object (contains unknown|missing required) field `(.*)`", text):
            path = f"{where}.{field[2]}".removeprefix(".")
            return InputProblem("missing" if "missing" in field[1] else "unknown", path)
        return InputProblem("invalid", where, text[:1].lower() + text[1:].replace("`", ""))

    def sentence(self, noun: str) -> str:
        """One line for the user; ``noun``: their word for a field."""
        if self.kind == "invalid":
            return f"{self.where}: {self.reason}" if self.where else self.reason
        return f"{self.kind} {noun}: {self.where}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """``; did you mean NAME?`` for the closest known name, first one of the same letters; empty
    where none is close. Options are compared without their dashes, which would make any two short
    ones alike."""
    name = name.lstrip("-")
    by_text = {candidate.lstrip("-"): candidate for candidate in names}
    close = get_close_matches(name, list(by_text), n=3, cutoff=0.6)
    close.sort(key=lambda candidate: sorted(candidate) != sorted(name))
    return f"; did you mean {by_text[close[0]]}?" if close else ""
