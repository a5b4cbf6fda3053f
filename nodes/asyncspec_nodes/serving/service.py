"""The draft node's text service: clients' requests in, text out. Pure.

A refused request's ``Finished`` has empty stats; clients distinguish it so from a failed one.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec.structs import replace

from asyncspec.core.accept import TargetOutput
from asyncspec.core.machine import Cancelled, Emit, Finish, Request, Stopped, Submitted
from asyncspec_nodes.serving.prompts import PendingRequest, PromptReader, ResponseSink, WorkQueue
from asyncspec_nodes.serving.requests import Encoder, Refusal, ServingConfig
from asyncspec_nodes.serving.text import Codec, answer_text
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.messages import Cancel, Finished, Output, Submit

UNKNOWN = -9999.0
"""The OpenAI API's log-probability of tokens too unlikely to have one."""


class Speller(Protocol):
    """The part of a tokenizer for log-probabilities."""

    def spell(self, token: int) -> bytes:
        """A token's bytes; the name of a special token."""


def output(
    request: int,
    tokens: tuple[int, ...],
    text: str,
    outputs: Sequence[TargetOutput],
    tops: int,
    speller: Speller,
) -> Output:
    """An ``Output`` with log-probabilities where ``outputs`` has them: of each token and of the
    ``tops`` most likely at its position."""
    if not outputs:
        return Output(request, tokens, text)
    top_tokens = tuple(t for one in outputs for t in one.top_tokens[:tops])
    return Output(
        request,
        tokens,
        text,
        tuple(_finite(one.log_prob_of(token)) for one, token in zip(outputs, tokens, strict=True)),
        top_tokens,
        tuple(_finite(p) for one in outputs for p in one.top_log_probs[:tops]),
        tuple(map(speller.spell, (*tokens, *top_tokens))),
    )


def _finite(log_prob: float | None) -> float:
    return UNKNOWN if log_prob is None else max(UNKNOWN, log_prob)


class TextCodec(Codec, Encoder, Speller, Protocol):
    """The whole tokenizer."""


class _Answer:
    """A running request."""

    def __init__(
        self, client: ResponseSink, submit: Submit, prompt: Sequence[int], codec: Codec
    ) -> None:
        self.client = client
        # The client's request number.
        self.number = submit.request
        self.text = answer_text(codec, submit, prompt)
        self.tops = submit.top_logprobs
        # Tokens sent, and whether a stop string has ended the answer.
        self.tokens = 0
        self.stopped = False


class TextService:
    """Requests of all clients of one draft node. ``feed`` takes inputs of its machine;
    ``work_queue`` tokenizes long prompts."""

    def __init__(
        self,
        codec: TextCodec,
        rules: ServingConfig,
        feed: Callable[[Submitted | Cancelled | Stopped], None],
        work_queue: WorkQueue,
        *,
        most: int,
    ) -> None:
        self._codec = codec
        self._feed = feed
        self._reading = PromptReader(rules, codec, work_queue, self._read)
        # Requests at a time, waiting ones included.
        self._most = most
        self._secret = secrets.token_bytes(32)
        self._next = 0
        self._answers: dict[int, _Answer] = {}

    def client(self, client: ResponseSink, message: Submit | Cancel) -> None:
        """Handle a client's message. Raises ``RemoteProtocolError`` for a number in use."""
        running = self._numbers(client)
        if isinstance(message, Cancel):
            if message.request in running:
                self._cancel(running[message.request])
        elif message.request in running:
            raise RemoteProtocolError(f"request {message.request} is still running")
        elif len(self._answers) + len(self._reading) >= self._most:
            text = f"{self._most} requests are waiting already; try again later"
            client.send(Finished(message.request, "error", text, {}, "busy"))
        else:
            self._next += 1
            submit = replace(message, tenant=self._blinded(message.tenant))
            self._reading.read(PendingRequest(self._next, client, submit))

    def client_gone(self, client: ResponseSink) -> None:
        """Cancel the requests of a client that has disconnected."""
        for number in self._numbers(client).values():
            self._cancel(number)

    def emit(self, effect: Emit) -> str:
        """Send committed tokens to their client; returns their text."""
        answer = self._answers[effect.request]
        if answer.stopped:
            return ""  # emitted before the machine processed ``Stopped``
        piece = answer.text.push(effect.tokens)
        answer.tokens += piece.tokens
        tokens, outputs = effect.tokens[: piece.tokens], effect.outputs[: piece.tokens]
        answer.client.send(
            output(answer.number, tokens, piece.text, outputs, answer.tops, self._codec)
        )
        if piece.stopped:
            answer.stopped = True
            self._feed(Stopped(effect.request, answer.tokens))
        return piece.text

    def finish(self, effect: Finish) -> str:
        """End a request; returns the text that was held back."""
        answer = self._answers.pop(effect.request)
        reason, rest = effect.reason, ""
        if not answer.stopped:
            piece = answer.text.finish()
            answer.stopped, rest = piece.stopped, piece.text
        if answer.stopped:
            reason = "stop"  # the machine may have ended it otherwise before ``Stopped``
        if rest:
            answer.client.send(Output(answer.number, (), rest))
        detail, code = ("", "") if answer.stopped else (effect.detail, effect.code)
        answer.client.send(Finished(answer.number, reason, detail, effect.stats, code))
        return rest

    def _read(self, asked: PendingRequest, found: Request | Refusal) -> None:
        client, submit = asked.client, asked.submit
        if isinstance(found, Refusal):
            client.send(Finished(submit.request, "error", found.text, {}, found.code))
            return
        self._answers[asked.number] = _Answer(client, submit, found.prompt, self._codec)
        self._feed(Submitted(found))

    def _cancel(self, number: int) -> None:
        asked = self._reading.drop(number)
        if asked is None:
            self._feed(Cancelled(number))
        else:
            asked.client.send(Finished(asked.submit.request, "cancelled", "", {}))

    def _blinded(self, tenant: str) -> str:
        """A tenant's name inside this process. Traces contain it, and no client can use it."""
        if not tenant:
            return ""
        return hashlib.blake2b(tenant.encode(), key=self._secret, digest_size=16).hexdigest()

    def _numbers(self, client: ResponseSink) -> dict[int, int]:
        """A client's running requests: its number to ours."""
        running = {a.number: n for n, a in self._answers.items() if a.client is client}
        return running | self._reading.numbers(client)
