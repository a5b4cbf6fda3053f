"""Standard streams that may be closed, full or without a reader: a lost write to stdout is an
error, one to stderr is ignored. Imported at process start, so it imports only light modules.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TextIO, cast


class Unwritten(Exception):
    """Output to stdout is lost. The text is the reason; empty for a closed pipe. Not an
    ``AsyncSpecError``, whose handlers would attribute it to a request."""


@contextmanager
def strict_stdout() -> Iterator[None]:
    """Inside and at the end, failed writes to stdout raise ``Unwritten``."""
    before = sys.stdout
    strict = _Strict(_prepared(before))
    sys.stdout = cast(TextIO, strict)
    try:
        yield
    finally:
        sys.stdout = strict.stream
        strict.flush()


@contextmanager
def lenient_stderr() -> Iterator[None]:
    """Inside, failed writes to stderr are ignored."""
    lenient = _Lenient(_prepared(sys.stderr))
    sys.stderr = cast(TextIO, lenient)
    try:
        yield
    finally:
        sys.stderr = lenient.stream
        try:
            sys.stderr.flush()
        except OSError:
            _drop_rest(sys.stderr)


def _prepared(stream: TextIO | None) -> TextIO:
    if stream is None:  # closed by the parent process
        return open(os.devnull, "w")
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        # Characters the terminal's encoding lacks become question marks.
        reconfigure(errors="replace")
    return stream


def _drop_rest(stream: TextIO) -> None:
    """Discard the buffer, or the interpreter would fail to flush it at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


class _Stream:
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
        closed = isinstance(error, BrokenPipeError)
        raise Unwritten("" if closed else f"cannot write: {error.strerror}") from None


class _Lenient(_Stream):
    def write(self, text: str) -> int:
        with suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self.stream.flush()
