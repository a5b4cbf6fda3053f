"""Trace files: lines of JSON, written as they come and read as a whole
(docs/reference/trace.md)."""

from __future__ import annotations

import os
import stat
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec

from asyncspec.core.errors import UserError
from asyncspec.trace import records
from asyncspec.trace.records import DECODER, ENCODER, FORMAT, Header, Record, Trace


class TraceWriter:
    """Appends whole lines and nothing else: whenever the writer is killed, the file is readable.
    What it had before stays until ``begin``. Whatever cannot be written is a ``UserError``."""

    def __init__(self, path: Path, title: str = "") -> None:
        self._path = path
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise self._unwritten(error) from None
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        header = Header(FORMAT, f"asyncspec {version('asyncspec')}", now, title)
        # Until it is written.
        self._header = ENCODER.encode_lines([header])

    def begin(self) -> None:
        """There is something to record: from here on it is this trace's file."""
        header, self._header = self._header, b""
        if not header:
            return
        try:
            if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                self._file.truncate(0)
        except OSError as error:
            raise self._unwritten(error) from None
        self.write(header)

    def write(self, lines: bytes | bytearray | memoryview) -> None:
        """Append lines that are encoded already."""
        self.begin()
        rest = memoryview(lines)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise self._unwritten(error) from None

    def _unwritten(self, error: OSError) -> UserError:
        return UserError(f"cannot write the trace {self._path}: {error.strerror}")

    def add(self, lines: list[Record]) -> None:
        """Append lines."""
        self.write(ENCODER.encode_lines(lines))

    def close(self) -> None:
        """Nothing more comes."""
        self._file.close()


def read_trace(path: Path, *, partial: bool = False) -> Trace:
    """Read a file; ``partial`` forgives a last line that was cut off. Raises ``UserError``."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the trace {path}: {error.strerror}") from None
    if not data.strip():
        raise UserError(f"{path} is empty; record a trace with asyncspec run --trace FILE")
    lines = data.split(b"\n")
    header = _header(path, lines[0])
    cut = lines.pop()
    if cut and not partial:
        raise UserError(
            f"{path} was cut off in line {len(lines) + 1}; give --partial to read what is whole"
        )
    return Trace(header, tuple(_line(path, i, line) for i, line in enumerate(lines[1:], 2)))


def _header(path: Path, line: bytes) -> Header:
    try:
        header = DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        header = None
    if not isinstance(header, Header):
        raise UserError(f"{path} is not a trace: its first line is not the header of one")
    if header.format != FORMAT:
        raise UserError(
            f"{path} has trace format {header.format}, this program reads {FORMAT}; "
            f"it was written by {header.program}"
        )
    return header


def _line(path: Path, number: int, line: bytes) -> Record:
    try:
        found = DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is damaged in line {number}: {error}") from None
    if isinstance(found, Header):
        raise UserError(f"{path} is damaged in line {number}: a second header")
    if isinstance(found, records.Step) and found.until < found.at:
        raise UserError(f"{path} is damaged in line {number}: a step ends before it begins")
    return found
