"""Processes of this machine: how they are ended, and what they have said last."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

STOP_SECONDS = 5.0
"""How long a process may take to stop before it is killed."""


class Process(Protocol):
    """As much of ``asyncio.subprocess.Process``; it leads a process group."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """As ``subprocess`` has it."""

    def terminate(self) -> None:
        """Ask it to stop. Raises ``ProcessLookupError``."""

    async def wait(self) -> int:
        """Its exit code, once it has ended."""


async def end(process: Process) -> None:
    """End a process and whatever it has started."""
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
    """The last line of a log, in brackets for the end of a sentence; empty where there is none."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return f" ({lines[-1].strip()})" if lines else ""


# --- What a child process says, line by line.

_PIECE = 1 << 16


async def lines(pipe: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Each line without its end, also one that is longer than what the reader would hold by itself:
    why a node stops may be a long story. What follows the last end is a line too."""
    held: list[bytes] = []
    while piece := await pipe.read(_PIECE):
        first, *others = piece.split(b"\n")
        held.append(first)
        for begun in others:
            yield b"".join(held)
            held = [begun]
    if any(held):
        yield b"".join(held)
