"""Prompts become tokens: short ones at once, long ones on a thread.

Law of this file: what a client asks for comes out in the order in which it went in, and the event
loop reads no prompt that is longer than ``SHORT``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple, Protocol, TypeVar

from asyncspec.core.machine import Request
from asyncspec_nodes.serving.requests import Encoder, Refusal, ServingConfig, prepare
from asyncspec_protocol.messages import Finished, Output, Submit

SHORT = 1024
"""Characters of a prompt that is read on the event loop, in less than a millisecond (measured with
the bundled tokenizer: .06 ms, and .8 us a character). For a million of them no verdict and no prune
would get through for a second."""

T = TypeVar("T")

FAILED = Refusal("the draft node has made a mistake while it read the prompt", "internal")


class WorkQueue(Protocol):
    """Where work is done that would hold up everything else."""

    def submit(
        self, work: Callable[[], T], done: Callable[[T], None], failed: Callable[[], None]
    ) -> None:
        """Do ``work``, later; ``done`` or ``failed`` is called on the event loop. What it raises is
        our own mistake, and reported."""


class ResponseSink(Protocol):
    """Where answers go: a link. One that is gone swallows what it is sent."""

    def send(self, message: Output | Finished, /) -> object:
        """Queue a message."""


class PendingRequest(NamedTuple):
    """A request on its way, under the draft node's own number."""

    number: int
    client: ResponseSink
    submit: Submit


class PromptReader:
    """The requests of all clients until they are understood. ``then`` is told of each, unless it is
    dropped before, on the event loop."""

    def __init__(
        self,
        rules: ServingConfig,
        encoder: Encoder,
        aside: WorkQueue,
        then: Callable[[PendingRequest, Request | Refusal], None],
    ) -> None:
        self._rules = rules
        # One for the event loop and one for the thread.
        self._here, self._there = _LastPrompt(encoder), _LastPrompt(encoder)
        self._aside = aside
        self._then = then
        # Given to the thread and not yet told of, by number.
        self._away: dict[int, PendingRequest] = {}

    def __len__(self) -> int:
        return len(self._away)

    def numbers(self, client: ResponseSink) -> dict[int, int]:
        """A client's requests that are being read: its own number to ours."""
        mine = (asked for asked in self._away.values() if asked.client is client)
        return {asked.submit.request: asked.number for asked in mine}

    def read(self, asked: PendingRequest) -> None:
        """Understand a request; its number is new."""
        if _length(asked.submit) <= SHORT and not self.numbers(asked.client):
            self._then(asked, self._prepare(asked, self._here))
            return
        number = asked.number
        self._away[number] = asked
        done, failed = partial(self._done, number), partial(self._done, number, FAILED)
        # By its number alone: a long prompt that is dropped takes no memory until its turn comes.
        self._aside.submit(partial(self._work, number), done, failed)

    def drop(self, number: int) -> PendingRequest | None:
        """Nobody wants it any more; None where it was not, or is not any more, being read."""
        return self._away.pop(number, None)

    def _work(self, number: int) -> Request | Refusal | None:
        """On the thread. None: it was dropped before its turn has come."""
        asked = self._away.get(number)
        return asked and self._prepare(asked, self._there)

    def _prepare(self, asked: PendingRequest, last: _LastPrompt) -> Request | Refusal:
        encoder = last.of(asked.submit.tenant)
        return prepare(asked.submit, asked.number, self._rules, encoder)

    def _done(self, number: int, found: Request | Refusal | None) -> None:
        asked = self.drop(number)
        if asked is not None and found is not None:
            self._then(asked, found)


def _length(submit: Submit) -> int:
    """Characters to be read. A prompt that comes as tokens has none."""
    return 0 if submit.prompt_ids else len(submit.chat or submit.prompt)


class _LastPrompt:
    """An ``Encoder`` that reads a prompt once for all of its answers, which are asked for one after
    another by the same tenant."""

    def __init__(self, encoder: Encoder) -> None:
        self.encode = lru_cache(maxsize=1)(encoder.encode)
        self.render = lru_cache(maxsize=1)(encoder.render)
        self._tenant = ""

    def of(self, tenant: str) -> _LastPrompt:
        """The encoder for a tenant's prompt: it has forgotten other tenants' ones, as how fast one
        is read would tell of them."""
        if tenant != self._tenant:
            self.encode.cache_clear()
            self.render.cache_clear()
            self._tenant = tenant
        return self
