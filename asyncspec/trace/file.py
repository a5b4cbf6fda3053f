"""Trace files: lines of JSON (docs/reference/trace.md), written as they come and read whole."""

from __future__ import annotations

import os
import stat
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

import msgspec

from asyncspec.core.errors import UserError, reading, writing
from asyncspec.trace.records import DECODER, ENCODER, FORMAT, Line, Record, Step, Trace, TraceHeader


class TraceWriter:
    """Appends whole lines, so that the file is readable whenever the writer is killed. Its previous
    content stays until ``begin``. A failed write is a ``UserError``."""

    def __init__(self, path: Path, title: str = "") -> None:
        self._writing = partial(writing, f"the trace {path}")
        with self._writing():
            self._file = path.open("ab", buffering=0)
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        header = TraceHeader(FORMAT, f"asyncspec {version('asyncspec')}", now, title)
        # Until it is written.
        self._header = ENCODER.encode_lines([header])

    def begin(self) -> None:
        """Replace what the file contains by the header, once."""
        header, self._header = self._header, b""
        if header:
            with self._writing():
                if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                    self._file.truncate(0)
            self.write(header)

    def write(self, lines: bytes | bytearray | memoryview) -> None:
        self.begin()
        rest = memoryview(lines)
        with self._writing():
            while rest:
                rest = rest[self._file.write(rest) :]

    def add(self, lines: list[Record]) -> None:
        self.write(ENCODER.encode_lines(lines))

    def close(self) -> None:
        self._file.close()


def read_trace(path: Path, *, partial: bool = False) -> Trace:
    """Read a file; ``partial`` forgives a last line that was cut off. Raises ``UserError``."""
    with reading(f"the trace {path}"):
        data = path.read_bytes()
    if not data.strip():
        raise UserError(f"{path} is empty; record a trace with asyncspec run --trace FILE")
    *lines, cut = data.split(b"\n")
    header = _decode(lines[0] if lines else cut)
    if not isinstance(header, TraceHeader):
        raise UserError(f"{path} is not a trace: its first line is not the header of one")
    if header.format != FORMAT:
        raise UserError(
            f"{path} has trace format {header.format}, this program reads {FORMAT}; "
            f"it was written by {header.program}"
        )
    if cut and not partial:
        raise UserError(
            f"{path} was cut off in line {len(lines) + 1}; give --partial to read what is whole"
        )
    return Trace(header, tuple(_line(path, i, line) for i, line in enumerate(lines[1:], 2)))


def _decode(line: bytes) -> Line | str:
    """A line, or why it is none."""
    try:
        return DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return str(error)


def _line(path: Path, number: int, line: bytes) -> Record:
    record = _decode(line)
    if isinstance(record, TraceHeader):
        record = "a second header"
    elif isinstance(record, Step) and record.until < record.at:
        record = "a step ends before it begins"
    if isinstance(record, str):
        raise UserError(f"{path} is damaged in line {number}: {record}")
    return record
