"""What a child process says, line by line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

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
