"""A client that reconnects, and whose answers go on behind a draft node that was lost.

A request, and the tokens that it has brought, are all that an answer needs to go on: what is drawn
depends on the seed and the position alone. So this side keeps both, and asks the draft node for the
rest when it is back (``Submit.given``). Tokens that were committed there and did not come are drawn
again, the same ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing

from msgspec.structs import replace

from asyncspec.actor.inbox import Event
from asyncspec.core.errors import AsyncSpecError, ClusterError
from asyncspec.core.stats import MAX_BREAKS, SUSPECT_BREAKS
from asyncspec_nodes.client.client import Client, FeatureSink, LinkLostError
from asyncspec_nodes.cluster.security import CHECK_SECONDS, renewals
from asyncspec_protocol.clients import BREAKS
from asyncspec_protocol.links import Facts
from asyncspec_protocol.messages import Finished, Output, Status, Submit

RECONNECT_SECONDS = (0.05, 2.0)
"""Pause before reconnecting to a lost draft node: doubled from the first to the second."""

RESUME_SECONDS = 60.0
"""How long a request waits for a lost draft node; a machine starts again in less."""


class Progress:
    """What a request has brought. ``model``: what it was begun with."""

    def __init__(self, submit: Submit, model: tuple[str, ...]) -> None:
        self.model = model
        self._submit = submit
        self._tokens = list(submit.given)
        self._characters = submit.given_text
        # Tokens of the prompt, with which an answer may begin.
        self._prompt = 0
        # Draft nodes lost in a row without a token between (``SUSPECT_BREAKS``).
        self.losses = 0
        # Crashes of draft nodes that worked on nothing else; whether the last one did so.
        self._lone_crashes, self._was_alone = 0, False
        # The crash that the draft node names which works on it now, and whether it has brought no
        # token.
        self._crash = 0
        self._silent = True

    def add(self, event: Event) -> bool:
        """An event of the answer has come. False: it has come before, from a draft node that was
        lost before the first token."""
        if isinstance(event, Output):
            if event.prompt_ids:
                new = event.prompt_start >= self._prompt
                self._prompt = max(self._prompt, event.prompt_start + len(event.prompt_ids))
                return new
            self._tokens += event.token_ids
            self._characters += len(event.text)
            if event.token_ids:
                self.losses, self._silent = 0, False
        return True

    def begun(self, welcome: Facts) -> None:
        """A draft node works on it."""
        self._crash = welcome.crash

    def lost(self, *, alone: bool) -> None:
        """The draft node that worked on it, and ``alone`` on it, is lost."""
        self.losses += alone or self._silent
        self._silent, self._was_alone = True, alone

    def back(self, welcome: Facts) -> None:
        """There is a draft node again. Where the one before has crashed, whatever it worked on is a
        suspect; what it worked on alone, twice, is not tried again."""
        if welcome.crash != self._crash:
            self._lone_crashes += self._was_alone
            self.losses = max(self.losses, SUSPECT_BREAKS, self._lone_crashes)

    def rest(self) -> Submit:
        """The request for what is missing."""
        if not self._tokens:
            return self._submit
        return replace(self._submit, given=tuple(self._tokens), given_text=self._characters)

    def poison(self) -> Finished:
        """The end of a request that is not asked again."""
        text = (
            f"the draft node was lost {self.losses} times in a row while it worked on this "
            "request, and no token came between; its log says why; it is not tried again"
        )
        stats = {"new_tokens": float(len(self._tokens))}
        return Finished(self._submit.request, "error", text, stats, BREAKS)


class ReconnectingEngine:
    """``async with``: a client that reconnects. Entering raises what the first ``connect`` raises.
    ``waits``: new requests wait for a lost draft node, as those that run do; otherwise they fail
    with ``ClusterError`` until it is back. ``notify`` receives a line for each loss, and for keys
    that cannot be read again; those are looked at every ``renewal_seconds``."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Client]],
        *,
        resume_seconds: float = RESUME_SECONDS,
        waits: bool = False,
        notify: Callable[[str], None] = lambda line: None,
        renewal_seconds: float = CHECK_SECONDS,
    ) -> None:
        self._connect = connect
        self._renewal_seconds = renewal_seconds
        self._resume_seconds = resume_seconds
        self._waits = waits
        self._notify = notify
        self._client: Client | None = None
        self._connected = asyncio.Event()
        # Why there is no client.
        self._error = ""
        self._closed = False
        # Requests that are not over.
        self._running = 0
        # Held by a request that may be what ends the draft node.
        self._trial = asyncio.Lock()

    async def __aenter__(self) -> ReconnectingEngine:
        self._client = await self._connect()
        self._connected.set()
        self._reconnecting = asyncio.create_task(self._reconnect())
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._closed, self._error = True, "this client of the draft node is closed"
        self._connected.set()  # who waits for the draft node is told
        self._reconnecting.cancel()
        await asyncio.gather(self._reconnecting, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    @property
    def client(self) -> Client:
        """The client now. Raises ``ClusterError`` while there is none."""
        if self._closed or self._client is None or self._client.link.gone.done():
            raise ClusterError(self._error or "the draft node is gone")
        return self._client

    async def ask(
        self, submit: Submit, features: FeatureSink | None = None
    ) -> AsyncGenerator[Event, None]:
        """The answer's events; the last is ``Finished``. Closing early cancels the request. Raises
        ``ClusterError``, also where a lost draft node does not come back in time."""
        client = await self._back() if self._waits else self.client
        progress = Progress(submit, _model(client))
        self._running += 1
        try:
            while progress.losses < MAX_BREAKS:
                try:
                    async with aclosing(self._tried(client, progress, features)) as events:
                        async for event in events:
                            yield event
                    return
                except LinkLostError:
                    progress.lost(alone=self._running == 1)
                client = await self._back()
                progress.back(client.welcome)
            yield progress.poison()
        finally:
            self._running -= 1

    def cancel(self) -> None:
        """Cancel all requests that the draft node works on; their last events say how far they
        came."""
        if self._client is not None and not self._client.link.gone.done():
            self._client.cancel()

    async def nodes(self) -> tuple[Status, ...]:
        return await self.client.nodes()

    async def _tried(
        self, client: Client, progress: Progress, features: FeatureSink | None
    ) -> AsyncGenerator[Event, None]:
        """What is missing of an answer; until its first token alone, if it is a suspect."""
        async with AsyncExitStack() as trial:
            if progress.losses >= SUSPECT_BREAKS:
                await trial.enter_async_context(self._trial)
                client = await self._back()
            if _model(client) != progress.model:
                raise ClusterError("the draft node is back with another target: ask again")
            progress.begun(client.welcome)
            async with aclosing(client.ask(progress.rest(), features)) as events:
                async for event in events:
                    new = progress.add(event)
                    if not progress.losses:
                        await trial.aclose()
                    if new:
                        yield event

    async def _back(self) -> Client:
        """The client, once the draft node is back. Raises ``ClusterError``."""
        seconds = self._resume_seconds
        try:
            async with asyncio.timeout(seconds):
                while True:
                    await self._connected.wait()
                    if self._closed:
                        raise ClusterError(self._error)
                    if self._client is not None and not self._client.link.gone.done():
                        return self._client
                    await asyncio.sleep(0)  # its loss is about to be noticed
        except TimeoutError:
            raise ClusterError(f"{self._error}; it was not back within {seconds:g} s") from None

    async def _reconnect(self) -> None:
        first, longest = RECONNECT_SECONDS
        while True:
            if self._client is not None:
                self._error = f"the draft node is gone: {await self._lost(self._client)}"
                self._connected.clear()
                self._client, pause = None, first
                self._notify(self._error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)
            try:
                self._client = await self._connect()
                self._connected.set()
            except AsyncSpecError as error:
                self._error = str(error)

    async def _lost(self, client: Client) -> str:
        """Wait for the loss of the draft node, also by keys that have changed: the reason."""
        renewing = asyncio.create_task(self._renew(client))
        try:
            return await asyncio.shield(client.link.gone)  # which others wait for as well
        finally:
            renewing.cancel()

    async def _renew(self, client: Client) -> None:
        async for refused in renewals(client.security, self._renewal_seconds):
            if refused:
                self._notify(f"keys not renewed: {refused}")
            else:
                client.check_certificate()


def _model(client: Client) -> tuple[str, ...]:
    """What must be the same for an answer to go on."""
    facts = client.welcome
    return facts.fingerprint, facts.dtype, facts.mode, facts.quantize
