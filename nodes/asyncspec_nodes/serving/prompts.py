"""Tokenizes prompts: short ones on the event loop, long ones on a worker thread, each client's in
order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple, Protocol, TypeVar

from asyncspec.backend.base import Tokenizer
from asyncspec.core.machine import Request
from asyncspec_nodes.serving.requests import Refusal, ServingConfig, Tokenize, prepare, tokenize
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
        config: ServingConfig,
        tokenizer: Tokenizer,
        work_queue: WorkQueue,
        then: Callable[[PendingRequest, Request | Refusal], None],
    ) -> None:
        self._config = config
        # For the event loop and for the thread. Each caches one prompt, as its ``n`` answers are
        # requested in a row; tenants share none, as the time to tokenize would reveal it.
        cache = lru_cache(maxsize=1)
        self._on_loop: Tokenize = cache(partial(tokenize, tokenizer))
        self._on_thread: Tokenize = cache(partial(tokenize, tokenizer))
        self._work_queue = work_queue
        self._then = then
        # Those that wait for the thread, by number.
        self._pending: dict[int, PendingRequest] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def numbers(self, client: ResponseSink) -> dict[int, int]:
        """A client's pending requests: its number to ours."""
        mine = (one for one in self._pending.values() if one.client is client)
        return {one.submit.request: one.number for one in mine}

    def read(self, pending: PendingRequest) -> None:
        """Tokenize a request with a new number."""
        number, client, submit = pending
        length = 0 if submit.prompt_ids else len(submit.chat or submit.prompt)
        if length <= SHORT and not self.numbers(client):
            self._then(pending, prepare(submit, number, self._config, self._on_loop))
            return
        self._pending[number] = pending
        done, failed = partial(self._done, number), partial(self._done, number, FAILED)
        # By number, so that a dropped prompt is freed at once.
        self._work_queue.submit(partial(self._work, number), done, failed)

    def drop(self, number: int) -> PendingRequest | None:
        """Cancel a request; None where it is not pending."""
        return self._pending.pop(number, None)

    def _work(self, number: int) -> Request | Refusal | None:
        """On the thread. None: the request was dropped."""
        pending = self._pending.get(number)
        return pending and prepare(pending.submit, number, self._config, self._on_thread)

    def _done(self, number: int, found: Request | Refusal | None) -> None:
        pending = self.drop(number)
        if pending is not None and found is not None:
            self._then(pending, found)
