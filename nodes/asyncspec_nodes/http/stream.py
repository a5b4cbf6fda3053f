"""A streamed response to one reader, who may be slow."""

from __future__ import annotations

import asyncio

from aiohttp import web

from asyncspec_nodes.http import sse


class Stream:
    """Law of this class: a reader who takes nothing for ``stall_seconds`` is cut off, and with the
    connection goes its request."""

    def __init__(self, request: web.Request, stall_seconds: float) -> None:
        self._request = request
        self._stall_seconds = stall_seconds
        self.response = web.StreamResponse(headers=sse.HEADERS)

    async def begin(self) -> None:
        """Status and headers."""
        await self.response.prepare(self._request)

    async def write(self, frame: bytes) -> None:
        """Give the reader something. Raises ``ConnectionError`` where there is none any more."""
        if not frame:
            return
        try:
            async with asyncio.timeout(self._stall_seconds):
                await self.response.write(frame)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the reader does not read") from None
