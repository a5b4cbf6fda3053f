"""The draft node of this process as an engine for an HTTP service."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from msgspec.structs import replace

from asyncspec.actor.inbox import Answers, Event, Inbox
from asyncspec_nodes.node.inspector import Inspector
from asyncspec_nodes.serving.service import TextService
from asyncspec_protocol.messages import Cancel, Finished, Output, Status, Submit


class LocalEngine:
    """Answers requests by the text service of this process, without a link."""

    def __init__(self, service: TextService, inspector: Inspector) -> None:
        self._service = service
        self._inspector = inspector
        self._inboxes: dict[int, Inbox] = {}
        self._next = 0

    def send(self, message: Output | Finished, /) -> None:
        """Takes what the text service sends to its client."""
        if (inbox := self._inboxes.get(message.request)) is not None:
            inbox.put(message)

    async def ask(self, submit: Submit) -> AsyncGenerator[Event, None]:
        """The answer's events; the last is ``Finished``. Closing early cancels the request."""
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
        """Status of every reachable node, by rank."""
        answers = Answers()
        self._inspector.ask(answers, 0)
        return await answers.complete
