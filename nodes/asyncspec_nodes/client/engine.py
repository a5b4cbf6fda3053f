"""A draft node over a link that is dialled again when lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

from asyncspec.actor.inbox import Event
from asyncspec.core.errors import AsyncSpecError, ClusterError
from asyncspec_nodes.client.client import Client
from asyncspec_protocol.messages import Status, Submit

REDIAL_SECONDS = (0.1, 5.0)
"""Pause before a lost draft node is dialled again: doubled from the first to the second."""


class ReconnectingEngine:
    """``async with``: a client that reconnects. Entering raises what the first ``connect`` raises;
    later failures make requests fail with ``ClusterError`` until the link is back."""

    def __init__(self, connect: Callable[[], Awaitable[Client]]) -> None:
        self._connect = connect
        self._client: Client | None = None
        self._why = "the draft node was not reached yet"
        self._redialling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ReconnectingEngine:
        self._client = await self._connect()
        self._redialling = asyncio.create_task(self._redial())
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._redialling is not None
        self._redialling.cancel()
        await asyncio.gather(self._redialling, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    async def ask(self, submit: Submit) -> AsyncGenerator[Event, None]:
        """See ``Client.ask``."""
        async with contextlib.aclosing(self._linked().ask(submit)) as events:
            async for event in events:
                yield event

    async def nodes(self) -> tuple[Status, ...]:
        """See ``Client.nodes``."""
        return await self._linked().nodes()

    def _linked(self) -> Client:
        if self._client is None:
            raise ClusterError(self._why)
        return self._client

    async def _redial(self) -> None:
        first, most = REDIAL_SECONDS
        while True:
            if self._client is not None:
                self._why = f"the draft node is gone: {await self._client.link.gone}"
                self._client, pause = None, first
            await asyncio.sleep(pause)
            pause = min(2 * pause, most)
            try:
                self._client = await self._connect()
            except AsyncSpecError as error:
                self._why = str(error)
