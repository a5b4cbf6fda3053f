"""The draft node's text service: clients' requests in, text out. Pure.

Short prompts are read on the event loop, short conversations on one worker thread, as their
template is a foreign program, and what is long on another: each client's in order.
A refused request's ``Finished`` has empty stats; clients distinguish it so from a failed one.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple, Protocol, TypeVar

from msgspec.structs import replace

from asyncspec.backend.tokenizer import Tokenizer
from asyncspec.core.machine import Cancelled, Emit, Finish, Request, Stopped, Submitted
from asyncspec.core.tensors import WireTensor
from asyncspec_nodes.serving.answer import Answer, ResponseSink, outputs, progress_of
from asyncspec_nodes.serving.prompts import finite, prompt_outputs
from asyncspec_nodes.serving.requests import (
    BAD_GRAMMAR,
    Refusal,
    ServingConfig,
    Tokenize,
    prepare,
    tokenize,
)
from asyncspec_nodes.serving.totals import Totals
from asyncspec_protocol.clients import DRAINING
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.messages import Cancel, Finished, Output, Submit

SHORT = 1024
"""Characters of a prompt that is tokenized on the event loop, in less than a millisecond (measured
with the bundled tokenizer: .06 ms and .8 us a character). A million would block it for a second."""

SHORT_GIVEN = 64
"""Tokens of an answer's beginning that are decoded on the event loop, some 25 us each."""

T = TypeVar("T")

UNFINISHED = "its grammar has outgrown the parser's limits; make it simpler"
MISFIT = "the tokens that are given do not fit the answer's grammar"

FAILED = Refusal("the draft node has made a mistake while it read the prompt", "internal")


class WorkQueue(Protocol):
    """Runs work that would block the event loop."""

    def submit(
        self, work: Callable[[], T], done: Callable[[T], None], failed: Callable[[], None]
    ) -> None:
        """Run ``work`` on another thread, then ``done`` or ``failed`` on the event loop. An
        exception is a bug and is reported."""


class PendingRequest(NamedTuple):
    """A request under the draft node's own number."""

    number: int
    client: ResponseSink
    submit: Submit


class _Reader(NamedTuple):
    """A thread that reads requests. Its cache has one prompt, as the ``n`` answers of one are
    requested in a row; tenants share none, as the time to tokenize would reveal it."""

    queue: WorkQueue
    tokenize: Tokenize


class _Waiting(NamedTuple):
    """A request that is being read, or waits for that."""

    asked: PendingRequest
    reader: _Reader


DRAINS = "drains: it takes no new requests"


class _Ready(NamedTuple):
    """A request that has been read."""

    request: Request
    # Text of what the client gave, or of the prompt where it asks for nothing else.
    text: str
    # None: it asks for the prompt alone.
    answer: Answer | None
    # Why its answer has ended already; empty where it goes on.
    end: str


class TextService:
    """Requests of all clients of one draft node. ``feed`` takes inputs of its machine;
    ``work_queue`` reads long requests, ``quick_queue`` short conversations; ``totals`` counts what
    is served."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: ServingConfig,
        feed: Callable[[Submitted | Cancelled | Stopped], None],
        work_queue: WorkQueue,
        quick_queue: WorkQueue | None = None,
        *,
        max_requests: int,
        totals: Totals | None = None,
        reading: Callable[[bool], None] = lambda some: None,
    ) -> None:
        """``reading`` is told when requests are being read, and when none is any more."""
        self._reading = reading
        self.totals = totals or Totals(lambda: 0.0)
        self._config = config
        self._tokenizer = tokenizer
        self._feed = feed
        cache = lru_cache(maxsize=1)
        self._on_loop: Tokenize = cache(partial(tokenize, tokenizer))
        self._slow = _Reader(work_queue, cache(partial(tokenize, tokenizer)))
        quick_queue = work_queue if quick_queue is None else quick_queue
        self._quick = _Reader(quick_queue, cache(partial(tokenize, tokenizer)))
        # Those whose prompts wait for a thread, by number, in order.
        self._pending: dict[int, _Waiting] = {}
        # Requests at a time, waiting ones included.
        self._max_requests = max_requests
        self._secret = secrets.token_bytes(32)
        # Who wants to know that no request is left; none is taken while ``draining``.
        self._drained: list[Callable[[str], None]] = []
        self.draining = False
        self._next = 0
        self._answers: dict[int, Answer] = {}

    def client(self, client: ResponseSink, message: Submit | Cancel) -> None:
        """Handle a client's message. Raises ``RemoteProtocolError`` for a number in use."""
        running = self._numbers(client)
        if isinstance(message, Cancel):
            if message.request in running:
                self._cancel(running[message.request])
        elif message.request in running:
            raise RemoteProtocolError(f"request {message.request} is still running")
        elif self.draining and not message.given:
            self.totals.refused(0)
            client.send(
                Finished(message.request, "error", f"the draft node {DRAINS}", {}, DRAINING)
            )
        elif len(self._answers) + len(self._pending) >= self._max_requests:
            text = f"{self._max_requests} requests are waiting already; try again later"
            self.totals.refused(0)
            client.send(Finished(message.request, "error", text, {}, "busy"))
        else:
            self._next += 1
            if not message.prompt_only:  # which nothing is computed for
                self.totals.arrived(self._next)
            submit = replace(message, tenant=self._blinded(message.tenant))
            self._read(PendingRequest(self._next, client, submit))

    def drain(self, done: Callable[[str], None]) -> None:
        """Take no new requests; ``done("")`` is called when none is left, or with why not."""
        self.draining = True
        self._drained.append(done)
        self._tell_drained()

    def resume(self) -> None:
        """Take requests again."""
        self.draining = False
        self._tell_drained("it takes requests again")

    def _tell_drained(self, reason: str = "") -> None:
        if self._drained and (reason or not (self._answers or self._pending)):
            waiting, self._drained = self._drained, []
            for done in waiting:
                done(reason)

    def client_gone(self, client: ResponseSink) -> None:
        """Cancel the requests of a client that has disconnected."""
        for number in self._numbers(client).values():
            self._cancel(number)

    def request_id(self, number: int) -> str:
        """The client's own name for a running request, for logs; empty where it has none."""
        answer = self._answers.get(number)
        return "" if answer is None else answer.id

    def emit(self, effect: Emit) -> str:
        """Send committed tokens to their client; returns their text."""
        answer = self._answers[effect.request]
        if answer.stop:
            return ""  # emitted before the machine processed ``Stopped``
        if effect.prompt_read:
            # An answer that has begun is one whose prompt is read anew after a break.
            if total := answer.prompt_tokens:
                counts = total, effect.shared_tokens, effect.prompt_read
                answer.client.send(progress_of(answer.number, *counts))
            return ""
        if answer.echo:
            scores, spell = effect.prompt_logprobs, self._tokenizer.spell
            for part in prompt_outputs(answer.number, answer.echo, scores, spell):
                answer.client.send(part)
            answer.echo = ()
        if not effect.tokens:
            return ""
        piece, lengths = answer.push_each(effect.tokens)
        self.totals.emitted(effect.request, piece.tokens)
        tokens, outputs = effect.tokens[: piece.tokens], effect.outputs[: piece.tokens]
        output = Output(answer.number, tokens, piece.text, text_lengths=lengths)
        if answer.prompt_tokens:
            counted, shared = answer.prompt_tokens, effect.shared_tokens
            output = replace(output, prompt_tokens=counted, shared_tokens=shared)
            answer.prompt_tokens = 0
        if outputs:
            count = answer.top_logprobs
            top_tokens = tuple(token for one in outputs for token in one.top_tokens[:count])
            chosen = zip(outputs, tokens, strict=True)
            output = replace(
                output,
                token_log_probs=tuple(finite(one.log_prob_of(token)) for one, token in chosen),
                top_tokens=top_tokens,
                top_token_log_probs=tuple(
                    finite(log_prob) for one in outputs for log_prob in one.top_log_probs[:count]
                ),
                token_bytes=tuple(map(self._tokenizer.spell, (*tokens, *top_tokens))),
            )
        answer.client.send(output)
        if piece.stopped:
            answer.stop = piece.stop
            self._feed(Stopped(effect.request, answer.tokens))
        return piece.text

    def emit_features(self, effect: Emit, features: WireTensor) -> None:
        """Send features of the target to their client."""
        answer = self._answers[effect.request]
        message = Output(answer.number, (), "", features_start=effect.features_start)
        answer.client.send(message, features)

    def finish(self, effect: Finish) -> str:
        """End a request; returns the text that was held back."""
        answer = self._answers.pop(effect.request)
        reason, rest = effect.reason, ""
        if not answer.stop:
            piece = answer.finish()
            answer.stop, rest = piece.stop, piece.text
        if answer.stop:
            reason = "stop"  # the machine may have ended it otherwise before ``Stopped``
        for output in outputs(answer.number, (), rest):
            answer.client.send(output)
        self.totals.finished(effect.request, reason, effect.stats)
        detail, code = ("", "") if answer.stop else (effect.detail, effect.code)
        matcher = None if answer.stop else answer.matcher
        if reason == "stop" and matcher is not None and not matcher.complete:
            # The stage's parser has met its limits, and only an end was left to draw.
            reason, detail, code = "error", UNFINISHED, BAD_GRAMMAR
        end = Finished(answer.number, reason, detail, effect.stats, code, answer.stop)
        answer.client.send(end)
        self._tell_drained()
        return rest

    def _read(self, pending: PendingRequest) -> None:
        """Read a request: on a thread if that may take long, or if it follows one that is."""
        number, client, submit = pending
        length = 0 if submit.prompt_ids else len(submit.chat or submit.prompt + submit.suffix)
        short = (
            length <= SHORT
            and len(submit.given) <= SHORT_GIVEN
            and not submit.constraint.grammar
            and not (submit.prompt_only and len(submit.prompt_ids) > SHORT_GIVEN)
        )
        self._reading(True)
        # Nobody overtakes himself.
        waiting = (one for one in reversed(self._pending.values()) if one.asked.client is client)
        reader = next((one.reader for one in waiting), None)
        if short and reader is None and not submit.chat:
            self._begin(pending, self._ready(pending, self._on_loop))
            self._reading(bool(self._pending))
            return
        reader = reader or (self._quick if short else self._slow)
        self._pending[number] = _Waiting(pending, reader)
        done, failed = partial(self._done, number), partial(self._done, number, FAILED)
        # By number, so that a dropped prompt is freed at once.
        reader.queue.submit(partial(self._work, number), done, failed)

    def _work(self, number: int) -> _Ready | Refusal | None:
        """On a thread. None: the request was dropped."""
        waiting = self._pending.get(number)
        return waiting and self._ready(waiting.asked, waiting.reader.tokenize)

    def _done(self, number: int, outcome: _Ready | Refusal | None) -> None:
        waiting = self._pending.pop(number, None)
        if waiting is not None and outcome is not None:
            self._begin(waiting.asked, outcome)
        self._reading(bool(self._pending))
        self._tell_drained()

    def _ready(self, pending: PendingRequest, read: Tokenize) -> _Ready | Refusal:
        """Read a request, and the beginning of its answer that the client has. On any thread."""
        number, client, submit = pending
        request = prepare(submit, number, self._config, read)
        if isinstance(request, Refusal):
            return request
        if submit.prompt_only:
            return _Ready(request, self._tokenizer.decode(request.prompt), None, "stop")
        grammar, grammars = submit.constraint.grammar, self._config.grammars
        matcher = grammars.matcher(grammar) if grammar and grammars else None
        answer = Answer(client, submit, request.prompt, self._tokenizer, matcher)
        start, end = request.given, ""
        if not start:
            return _Ready(request, "", answer, end)
        if matcher is not None and not matcher.commit(start):
            return Refusal(MISFIT, "given_token_ids")
        piece = answer.begin(start)
        answer.stop = piece.stop
        if piece.stopped or start[-1] in request.stop_tokens:
            end = "stop"
        elif len(start) >= request.max_new_tokens:
            end = "length"
        return _Ready(request, piece.text, answer, end)

    def _begin(self, pending: PendingRequest, outcome: _Ready | Refusal) -> None:
        number, client, submit = pending
        if isinstance(outcome, Refusal):
            self.totals.refused(number)
            client.send(Finished(submit.request, "error", outcome.text, {}, outcome.code))
            return
        request, text, answer, end = outcome
        shown = request.prompt if answer is None else ()
        for output in outputs(submit.request, shown, text):
            client.send(output)
        if answer is None:
            stats = {"prompt_tokens": float(len(request.prompt))}
            client.send(Finished(submit.request, end, "", stats))
            return
        self._answers[number] = answer
        if end:
            stats = {"prompt_tokens": len(request.prompt), "new_tokens": answer.tokens}
            self.finish(Finish(number, end, stats=stats))
        else:
            self._feed(Submitted(request))

    def _cancel(self, number: int) -> None:
        waiting = self._pending.pop(number, None)
        if waiting is None:
            self._feed(Cancelled(number))
        else:
            _, client, submit = waiting.asked
            if not submit.prompt_only:
                self.totals.finished(number, "cancelled", {})
            client.send(Finished(submit.request, "cancelled", "", {}))
            self._tell_drained()

    def _blinded(self, tenant: str) -> str:
        """A tenant's name inside this process. Traces contain it, and no client can use it."""
        if not tenant:
            return ""
        return hashlib.blake2b(tenant.encode(), key=self._secret, digest_size=16).hexdigest()

    def _numbers(self, client: ResponseSink) -> dict[int, int]:
        """A client's running requests: its number to ours."""
        running = {a.number: n for n, a in self._answers.items() if a.client is client}
        waiting = (one.asked for one in self._pending.values())
        pending = (one for one in waiting if one.client is client)
        return running | {one.submit.request: one.number for one in pending}
