"""Tokenizes prompts: short ones on the event loop, long ones on a worker thread, each client's in
order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple, Protocol, TypeVar

from asyncspec.core.machine import Request
from asyncspec_nodes.serving.requests import Encoder, Refusal, ServingConfig, prepare
from asyncspec_protocol.messages import Finished, Output, Submit

SHORT = 1024
"""Characters of a prompt that is tokenized on the event loop, in less than a millisecond (measured
with the bundled tokenizer: .06 ms and .8 us a character). A million would block it for a second."""

T = TypeVar("T")

FAILED = Refusal("the draft node has made a mistake while it read the prompt", "internal")


class WorkQueue(Protocol):
    """Runs work that would block the event loop."""

    def submit(
        self, work: Callable[[], T], done: Callable[[T], None], failed: Callable[[], None]
    ) -> None:
        """Run ``work`` on another thread, then ``done`` or ``failed`` on the event loop. An
        exception is a bug and is reported."""


class ResponseSink(Protocol):
    """Receives a request's answer; ignores messages once its link is gone."""

    def send(self, message: Output | Finished, /) -> object:
        """Queue a message."""


class PendingRequest(NamedTuple):
    """A request under the draft node's own number."""

    number: int
    client: ResponseSink
    submit: Submit


class PromptReader:
    """Tokenizes the requests of all clients. ``then`` is called on the event loop with each result,
    unless the request is dropped before."""

    def __init__(
        self,
        rules: ServingConfig,
        encoder: Encoder,
        aside: WorkQueue,
        then: Callable[[PendingRequest, Request | Refusal], None],
    ) -> None:
        self._rules = rules
        # For the event loop and for the thread.
        self._here, self._there = _LastPrompt(encoder), _LastPrompt(encoder)
        self._aside = aside
        self._then = then
        # In work on the thread, by number.
        self._in_work: dict[int, PendingRequest] = {}

    def __len__(self) -> int:
        return len(self._in_work)

    def numbers(self, client: ResponseSink) -> dict[int, int]:
        """A client's requests in work: its number to ours."""
        mine = (asked for asked in self._in_work.values() if asked.client is client)
        return {asked.submit.request: asked.number for asked in mine}

    def read(self, asked: PendingRequest) -> None:
        """Tokenize a request with a new number."""
        if _length(asked.submit) <= SHORT and not self.numbers(asked.client):
            self._then(asked, self._prepare(asked, self._here))
            return
        number = asked.number
        self._in_work[number] = asked
        done, failed = partial(self._done, number), partial(self._done, number, FAILED)
        # By number, so that a dropped prompt is freed at once.
        self._aside.submit(partial(self._work, number), done, failed)

    def drop(self, number: int) -> PendingRequest | None:
        """Cancel a request; None where it is not in work."""
        return self._in_work.pop(number, None)

    def _work(self, number: int) -> Request | Refusal | None:
        """On the thread. None: the request was dropped."""
        asked = self._in_work.get(number)
        return asked and self._prepare(asked, self._there)

    def _prepare(self, asked: PendingRequest, last: _LastPrompt) -> Request | Refusal:
        encoder = last.of(asked.submit.tenant)
        return prepare(asked.submit, asked.number, self._rules, encoder)

    def _done(self, number: int, found: Request | Refusal | None) -> None:
        asked = self.drop(number)
        if asked is not None and found is not None:
            self._then(asked, found)


def _length(submit: Submit) -> int:
    """Characters to tokenize; 0 for a prompt of token ids."""
    return 0 if submit.prompt_ids else len(submit.chat or submit.prompt)


class _LastPrompt:
    """An ``Encoder`` that caches one prompt, as its ``n`` answers are requested in a row."""

    def __init__(self, encoder: Encoder) -> None:
        self.encode = lru_cache(maxsize=1)(encoder.encode)
        self.render = lru_cache(maxsize=1)(encoder.render)
        self._tenant = ""

    def of(self, tenant: str) -> _LastPrompt:
        """The encoder for a tenant's prompt, without other tenants' cached ones: the time to
        tokenize would reveal them."""
        if tenant != self._tenant:
            self.encode.cache_clear()
            self.render.cache_clear()
            self._tenant = tenant
        return self
