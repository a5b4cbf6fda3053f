"""What the target said in the place of each token of an answer, as its client is told. Pure."""

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
"""In the OpenAI interface: too unlikely to have a log-probability."""


class Speller(Protocol):
    """The part of a tokenizer that is needed here."""

    def spell(self, token: int) -> bytes:
        """The bytes a token means; of a special one its name."""


def output(
    request: int,
    tokens: tuple[int, ...],
    text: str,
    outputs: Sequence[TargetOutput],
    tops: int,
    speller: Speller,
) -> Output:
    """New tokens for a client, with their log-probabilities where ``outputs`` has them, and with
    the ``tops`` likeliest in the place of each (fewer only where the vocabulary ends)."""
    if not outputs:
        return Output(request, tokens, text)
    likely = tuple(t for said in outputs for t in said.top_tokens[:tops])
    return Output(
        request,
        tokens,
        text,
        tuple(_shown(said.log_prob_of(token)) for said, token in zip(outputs, tokens, strict=True)),
        likely,
        tuple(_shown(p) for said in outputs for p in said.top_log_probs[:tops]),
        tuple(map(speller.spell, (*tokens, *likely))),
    )


def _shown(log_prob: float | None) -> float:
    return UNKNOWN if log_prob is None else max(UNKNOWN, log_prob)


# --- The draft node's text service: clients' requests in, text out.
# Law of this file: a refused request has cost nothing, so its ``Finished`` has empty stats; that
# is how a client knows that the request itself is to be changed.


class TextCodec(Codec, Encoder, Speller, Protocol):
    """The whole tokenizer."""


class _Answer:
    """A request that is being worked on."""

    def __init__(
        self, client: ResponseSink, submit: Submit, prompt: Sequence[int], codec: Codec
    ) -> None:
        self.client = client
        # The number the client gave it.
        self.number = submit.request
        self.text = answer_text(codec, submit, prompt)
        self.tops = submit.top_logprobs
        # Tokens the client was given, and whether a stop string has ended them.
        self.tokens = 0
        self.stopped = False


class TextService:
    """Requests of all clients of one draft node. ``feed`` takes inputs of its machine, ``aside``
    reads long prompts."""

    def __init__(
        self,
        codec: TextCodec,
        rules: ServingConfig,
        feed: Callable[[Submitted | Cancelled | Stopped], None],
        aside: WorkQueue,
        *,
        most: int,
    ) -> None:
        self._codec = codec
        self._feed = feed
        self._reading = PromptReader(rules, codec, aside, self._read)
        # Requests at a time, those that wait included.
        self._most = most
        self._secret = secrets.token_bytes(32)
        self._next = 0
        self._answers: dict[int, _Answer] = {}

    def client(self, client: ResponseSink, message: Submit | Cancel) -> None:
        """A client asks for something. Raises ``RemoteProtocolError`` for a number in use."""
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
        """Nobody reads these answers any more."""
        for number in self._numbers(client).values():
            self._cancel(number)

    def emit(self, effect: Emit) -> str:
        """Certain tokens for a user; the text they make."""
        answer = self._answers[effect.request]
        if answer.stopped:
            return ""  # the machine was at work on what follows before it could be told
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
        """The end of a request; the text that was held back."""
        answer = self._answers.pop(effect.request)
        reason, rest = effect.reason, ""
        if not answer.stopped:
            piece = answer.text.finish()
            answer.stopped, rest = piece.stopped, piece.text
        if answer.stopped:
            reason = "stop"  # whatever end the machine saw before it could be told
        if rest:
            answer.client.send(Output(answer.number, (), rest))
        detail, code = ("", "") if answer.stopped else (effect.detail, effect.code)
        answer.client.send(Finished(answer.number, reason, detail, effect.stats, code))
        return rest

    def _read(self, asked: PendingRequest, found: Request | Refusal) -> None:
        """A prompt has become tokens, or not."""
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
        """A tenant's name in this process: a recorded trace has it, and it is no name that a client
        could ask under."""
        if not tenant:
            return ""
        return hashlib.blake2b(tenant.encode(), key=self._secret, digest_size=16).hexdigest()

    def _numbers(self, client: ResponseSink) -> dict[int, int]:
        """A client's running requests: its own number to ours."""
        running = {a.number: n for n, a in self._answers.items() if a.client is client}
        return running | self._reading.numbers(client)
