"""Standard streams that may be closed, full or without a reader: a lost write to stdout is an
error, one to stderr is ignored, and in a service counted. Imported at process start, so it imports
only light modules.
"""

from __future__ import annotations

import errno
import os
import re
import select
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

FULL = (errno.ENOSPC, errno.EDQUOT)
"""The disk or the user's quota is exhausted."""

MAX_WAITING = 1 << 18
"""Bytes of a log that wait for its reader, or for room on its disk; further lines are lost."""


# Control characters could command the terminal; line breaks and tabs may stay.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """A model's text without what a terminal would obey."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


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


@contextmanager
def service_stderr() -> Iterator[None]:
    """Inside, a write to stderr never waits: a service must not stop because the reader of its log
    does. See ``LogStream``."""
    stderr = _prepared(sys.stderr)
    try:
        stream = LogStream(stderr)
    except (OSError, ValueError):  # no descriptor
        yield
        return
    sys.stderr = cast(TextIO, stream)
    try:
        yield
    finally:
        sys.stderr = stderr
        stream.close()


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


class LogStream:
    """A stream on the descriptor of another one that never waits. What cannot be written, as the
    disk is full or nobody reads the pipe, waits for the next write, up to ``MAX_WAITING`` bytes;
    lines beyond are lost, and a line says how many when it works again."""

    def __init__(self, stream: TextIO) -> None:
        """Raises ``OSError`` or ``ValueError`` for a stream without a descriptor."""
        stream.flush()
        self._stream = stream
        self._descriptor, self._blocks = _unblocked(stream.fileno())
        self._lock = threading.RLock()
        # A line, without its end, that says how many lines were lost, and why.
        self.lost_line: Callable[[int, str], str] = "{} lines of this log were lost: {}".format
        self._text = ""
        self._waiting = b""
        self._lost = 0
        self._why = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Written with the end of the line, or by ``flush``."""
        with self._lock:
            self._text += text
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Write what can be written now."""
        with self._lock:
            data, self._text = self._text.encode(errors="replace"), ""
            self._write()
            if self._lost and not self._waiting:
                said = self.lost_line(self._lost, self._why)
                self._waiting, self._lost = f"{said}\n".encode(), 0
                self._write()
            full = self._waiting and len(self._waiting) + len(data) > MAX_WAITING
            if data and (full or self._lost):
                self._lost += max(1, data.count(b"\n"))
            else:
                self._waiting += data
                self._write()

    def close(self) -> None:
        """Write what can be written; the other stream, which stays open, gets what may follow."""
        self.flush()
        if not self._blocks:
            os.close(self._descriptor)
            self._descriptor, self._blocks = self._stream.fileno(), True

    def _write(self) -> None:
        """As much of what waits as is taken."""
        try:
            while self._waiting:
                if self._blocks and not select.select([], [self._descriptor], [], 0)[1]:
                    raise BlockingIOError
                # A pipe that can be written to takes so many bytes at once.
                count = os.write(self._descriptor, self._waiting[: select.PIPE_BUF])
                self._waiting = self._waiting[count:]
        except BlockingIOError:
            self._why = "nobody read it"
        except OSError as error:
            self._why = error.strerror or str(error)


def _unblocked(descriptor: int) -> tuple[int, bool]:
    """A descriptor of the same file, and whether writing may block. Of a pipe or terminal another
    one: O_NONBLOCK would hold for all processes that share the first."""
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode) or os.isatty(descriptor):
        how = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
        with suppress(OSError):  # not on Linux, or another user's terminal
            return os.open(f"/proc/self/fd/{descriptor}", how), False
    return descriptor, True
