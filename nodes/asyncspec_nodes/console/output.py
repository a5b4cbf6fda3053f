"""The standard streams of a command as they may come: closed, on a full disk, with nobody there to
read them. What goes to stdout is what was asked for; what goes to stderr is said beside it.

Law of this file: it imports next to nothing (``main.py``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TextIO, cast


class Unwritten(Exception):
    """Output is lost; the text says why, and is empty where its reader has enough. Not an error
    of ours: what handles those would take it for one of a request's."""


@contextmanager
def strict_stdout() -> Iterator[None]:
    """Inside, and at the end, ``Unwritten`` is raised for what cannot be written to stdout."""
    before = sys.stdout
    guarded = _Strict(_prepared(before))
    sys.stdout = cast(TextIO, guarded)
    try:
        yield
    finally:
        sys.stdout = guarded.stream
        guarded.flush()


@contextmanager
def lenient_stderr() -> Iterator[None]:
    """Inside, what cannot be written to stderr is lost, and nothing else comes of it."""
    forgiven = _Lenient(_prepared(sys.stderr))
    sys.stderr = cast(TextIO, forgiven)
    try:
        yield
    finally:
        sys.stderr = forgiven.stream
        try:
            sys.stderr.flush()
        except OSError:
            _drop_rest(sys.stderr)


def _prepared(stream: TextIO | None) -> TextIO:
    if stream is None:  # closed by whoever started us
        return open(os.devnull, "w")
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        # A terminal that cannot show a character shows a mark in its place.
        reconfigure(errors="replace")
    return stream


def _drop_rest(stream: TextIO) -> None:
    """What is still in its buffer: the interpreter would trip over it at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


class _Stream:
    """A stream with other manners."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _Strict(_Stream):
    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError as error:
            self._fail(error)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> NoReturn:
        _drop_rest(self.stream)
        enough = isinstance(error, BrokenPipeError)
        raise Unwritten("" if enough else f"cannot write: {error.strerror}") from None


class _Lenient(_Stream):
    def write(self, text: str) -> int:
        with suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self.stream.flush()
