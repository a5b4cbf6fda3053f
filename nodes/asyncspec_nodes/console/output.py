"""Standard streams that may be closed, full or without a reader: a lost write to stdout is an
error, one to stderr is ignored. Imported at process start, so it imports only light modules.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

FULL = (errno.ENOSPC, errno.EDQUOT)
"""The disk or the user's quota is exhausted."""


class Unwritten(Exception):
    """Output to stdout is lost. The text is the reason; empty for a closed pipe. Not an
    ``AsyncSpecError``, whose handlers would attribute it to a request."""


@contextmanager
def strict_stdout() -> Iterator[None]:
    """Inside and at the end, failed writes to stdout raise ``Unwritten``."""

    def fail(error: OSError) -> None:
        _drop_rest(stream)
        closed = isinstance(error, BrokenPipeError)
        raise Unwritten("" if closed else f"cannot write: {error.strerror}") from None

    stream = _prepared(sys.stdout)
    guarded = _GuardedStream(stream, fail)
    sys.stdout = cast(TextIO, guarded)
    try:
        yield
    finally:
        sys.stdout = stream
        guarded.flush()


@contextmanager
def lenient_stderr() -> Iterator[None]:
    """Inside, failed writes to stderr are ignored."""
    stream = _prepared(sys.stderr)
    sys.stderr = cast(TextIO, _GuardedStream(stream, lambda error: None))
    try:
        yield
    finally:
        sys.stderr = stream
        _GuardedStream(stream, lambda error: _drop_rest(stream)).flush()


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


class _GuardedStream:
    """A stream that calls ``failed`` where a write fails."""

    def __init__(self, stream: TextIO, failed: Callable[[OSError], None]) -> None:
        self._stream, self._failed = stream, failed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._failed(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)
