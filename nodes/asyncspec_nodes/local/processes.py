"""Child processes: how they are ended, and their output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

STOP_SECONDS = 5.0
"""Time to stop before SIGKILL."""


class Process(Protocol):
    """The used part of ``asyncio.subprocess.Process``; it leads a process group."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """As in ``subprocess``."""

    def terminate(self) -> None:
        """Ask it to stop. Raises ``ProcessLookupError``."""

    async def wait(self) -> int:
        """Its exit code, once it has ended."""


async def end(process: Process) -> None:
    """End a process and its process group."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def last_line(log: Path) -> str:
    """`` (LAST LINE)`` of a log, to append to an error; empty where there is none."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return f" ({lines[-1].strip()})" if lines else ""


_PIECE = 1 << 16


async def lines(pipe: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Lines without their ends. Unlike ``readline`` it has no limit on a line's length: an error
    report may be long. Text after the last line break is a line too."""
    held: list[bytes] = []
    while piece := await pipe.read(_PIECE):
        first, *others = piece.split(b"\n")
        held.append(first)
        for start in others:
            yield b"".join(held)
            held = [start]
    if any(held):
        yield b"".join(held)
