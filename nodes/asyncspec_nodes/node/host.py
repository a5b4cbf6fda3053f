"""What surrounds a node's runtime in its process: the log, and on a draft node the text service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any, ClassVar, TypeVar

from msgspec.structs import replace

from asyncspec.actor.inbox import Event, Inbox, StatusAnswers
from asyncspec.actor.link import Link
from asyncspec.actor.routing import Host, Senders
from asyncspec.core.machine import Emit, Finish
from asyncspec.core.tensors import WireTensor
from asyncspec.trace.collector import OPERATORS_ONLY
from asyncspec_nodes.node.inspector import Inspector
from asyncspec_nodes.serving.service import TextService
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import Cancel, Drain, Drained, Finished, Output, Status, Submit

T = TypeVar("T")


class NodeHost(Host):
    """Logs, and on a draft node passes on to the text service."""

    senders: ClassVar[Senders] = dict.fromkeys((Submit, Cancel, Drain), ("client",))

    def __init__(self, log: Any) -> None:
        self._log = log
        self.service: TextService | None = None
        # Records the text of answers: request, tokens, text.
        self.record_text: Callable[[int, tuple[int, ...], str], None] | None = None

    def emit(self, effect: Emit) -> None:
        if self.service is not None:
            text = self.service.emit(effect)
            if self.record_text is not None:
                self.record_text(effect.request, effect.tokens, text)

    def emit_features(self, effect: Emit, features: WireTensor) -> None:
        if self.service is not None:
            self.service.emit_features(effect, features)

    def finish(self, effect: Finish) -> None:
        """Logs numbers, never text."""
        name = "" if self.service is None else self.service.request_id(effect.request)
        self._log.info(
            "finished",
            **({"request": name} if name else {}),
            session=int(effect.session),
            reason=effect.reason,
            detail=effect.detail,
            prompt_tokens=effect.stats.get("prompt_tokens"),
            new_tokens=effect.stats.get("new_tokens"),
        )
        if changes := effect.stats.get("processor_changes"):
            self._log.warning(
                "unlike_processors", session=int(effect.session), changes=int(changes)
            )
        if self.service is not None:
            rest = self.service.finish(effect)
            if self.record_text is not None and rest:
                self.record_text(effect.request, (), rest)

    def received(self, link: Link, message: Any, data: memoryview | None) -> None:
        if self.service is None:
            return
        if isinstance(message, Drain):
            self._drain(self.service, link, message)
        else:
            self.service.client(link, message)

    def _drain(self, service: TextService, link: Link, message: Drain) -> None:
        def done(reason: str) -> None:
            link.send(Drained(message.query, reason))

        if not link.operator:
            done(OPERATORS_ONLY)
        elif message.on:
            self._log.info("draining")
            service.drain(done)
        else:
            service.resume()
            done("")

    def joined(self, link: Link) -> None:
        if link.rank >= 0:
            self._log.info("linked", peer=int(link.rank))

    def lost(self, link: Link, reason: str) -> None:
        if link.rank >= 0:
            self.refused(link.rank, reason)
        elif self.service is not None:
            self.service.client_gone(link)

    def refused(self, rank: Rank, reason: str) -> None:
        self._log.warning("unlinked", peer=int(rank), why=reason)


class LocalEngine:
    """The draft node of this process as an ``EngineClient`` of the HTTP service, without a link."""

    def __init__(self, service: TextService, inspector: Inspector) -> None:
        self._service = service
        self._inspector = inspector
        self._inboxes: dict[int, Inbox] = {}
        self._numbers = count()

    def send(self, message: Output | Finished, tensor: WireTensor | None = None, /) -> None:
        """Features come to clients with a link only."""
        if (inbox := self._inboxes.get(message.request)) is not None:
            inbox.put(message)

    async def ask(self, submit: Submit) -> AsyncGenerator[Event, None]:
        """The answer's events; the last is ``Finished``. Closing early cancels the request."""
        number = next(self._numbers)
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
        answers = StatusAnswers()
        self._inspector.ask(answers, 0)
        return await answers.complete


class WorkerThread:
    """A ``WorkQueue``: one thread, whose running work the event loop's end drops."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        # The thread starts with the first work.
        self._pool = ThreadPoolExecutor(1, name)

    def submit(
        self, work: Callable[[], T], done: Callable[[T], None], failed: Callable[[], None]
    ) -> None:
        def finished(future: asyncio.Future[T]) -> None:
            error = future.exception()
            if error is None:
                done(future.result())
                return
            context = {"message": "background work has failed", "exception": error}
            self._loop.call_exception_handler(context)
            failed()

        self._loop.run_in_executor(self._pool, work).add_done_callback(finished)
