"""A spare's page cache: it holds what the stages of other machines read, so that one of them loads
from memory when its machine is gone."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from asyncspec.backend.base import FilePart
from asyncspec.backend.registry import backend_of
from asyncspec.core.errors import AsyncSpecError
from asyncspec.placement.model import Span
from asyncspec_nodes.node.resources import free_memory

PIECE = 1 << 20
"""Bytes that are read at a time."""

Find = Callable[[Span], Awaitable[str | None]]
"""The target with at least these layers on this machine; None: one of the Hub."""


def read_through(parts: Sequence[FilePart], most: int, stop: threading.Event) -> int:
    """Read these bytes, at most so many and until ``stop``, and keep none: the kernel does. Returns
    how many were read."""
    done, buffer = 0, bytearray(PIECE)
    for part in parts:
        with part.file.open("rb", buffering=0) as file:
            left = min(part.length, most - done)
            offset = part.offset
            while left > 0 and not stop.is_set():
                count = os.preadv(file.fileno(), [memoryview(buffer)[: min(PIECE, left)]], offset)
                if not count:
                    break
                done, offset, left = done + count, offset + count, left - count
    return done


class PageCache:
    """``find``: the target; what is not here is fetched to disk."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._spans: tuple[Span, ...] = ()
        self._reading: asyncio.Task[None] | None = None
        self._stop = threading.Event()

    def follow(self, spans: tuple[Span, ...]) -> None:
        """From now on it holds these layers, the first ones first, as far as memory is free."""
        if spans == self._spans:
            return
        self._spans = spans
        if self._reading is not None:
            self._reading.cancel()
        self._stop.set()  # a thread cannot be cancelled
        self._stop = threading.Event()
        self._reading = asyncio.create_task(self._read(spans, self._stop)) if spans else None

    async def _read(self, spans: Sequence[Span], stop: threading.Event) -> None:
        left = free_memory()
        for span in spans:
            # What cannot be had here is reported when it is needed.
            with suppress(AsyncSpecError, OSError):
                target = await self._find(span)
                if target is None:
                    return
                parts = await asyncio.to_thread(backend_of(target).stage_files, target, span)
                left -= await asyncio.to_thread(read_through, parts, left, stop)
