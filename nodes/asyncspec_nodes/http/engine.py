"""What the service stands on: a draft node, over a link or in this very process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol

from msgspec.structs import replace

from asyncspec.actor.inbox import Answers, Event, Inbox
from asyncspec.core.errors import AsyncSpecError, ClusterError
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.node.inspector import Inspector
from asyncspec_nodes.serving.service import TextService
from asyncspec_protocol.messages import Cancel, Finished, Output, Status, Submit

REDIAL_SECONDS = (0.1, 5.0)
"""Pause before a lost draft node is dialled again: doubled from the first to the second."""


class Engine(Protocol):
    """A cluster that answers requests."""

    def ask(self, submit: Submit) -> AsyncGenerator[Event, None]:
        """The answer, piece by piece; the last item is its ``Finished``. Leaving early cancels the
        request everywhere. Raises ``ClusterError``."""

    async def nodes(self) -> tuple[Status, ...]:
        """How every node that can be reached is, by rank. Raises ``ClusterError``."""


class NodeEngine:
    """The draft node this process is."""

    def __init__(self, service: TextService, inspector: Inspector) -> None:
        self._service = service
        self._inspector = inspector
        self._inboxes: dict[int, Inbox] = {}
        self._next = 0

    def send(self, message: Output | Finished, /) -> None:
        """See ``Client`` of the text service."""
        if (inbox := self._inboxes.get(message.request)) is not None:
            inbox.put(message)

    async def ask(self, submit: Submit) -> AsyncGenerator[Event, None]:
        """See ``Engine``."""
        number, self._next = self._next, self._next + 1
        inbox = Inbox(lambda: self._service.client(self, Cancel(number)))
        self._inboxes[number] = inbox
        try:
            self._service.client(self, replace(submit, request=number))
            async for event in inbox.read():
                yield event
        finally:
            del self._inboxes[number]
            inbox.close()

    async def nodes(self) -> tuple[Status, ...]:
        """See ``Engine``."""
        answers = Answers()
        self._inspector.ask(answers, 0)
        return await answers.complete


class LinkEngine:
    """A draft node somewhere else. Use it as a context: a link that is lost is dialled again."""

    def __init__(self, connect: Callable[[], Awaitable[Client]]) -> None:
        self._connect = connect
        self._client: Client | None = None
        self._why = "the draft node was not reached yet"
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LinkEngine:
        # The first time, who started the service is told what is wrong.
        self._client = await self._connect()
        self._keeper = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._keeper is not None
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    async def ask(self, submit: Submit) -> AsyncGenerator[Event, None]:
        """See ``Engine``."""
        async with contextlib.aclosing(self._linked().ask(submit)) as events:
            async for event in events:
                yield event

    async def nodes(self) -> tuple[Status, ...]:
        """See ``Engine``."""
        return await self._linked().nodes()

    def _linked(self) -> Client:
        if self._client is None:
            raise ClusterError(self._why)
        return self._client

    async def _keep(self) -> None:
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
