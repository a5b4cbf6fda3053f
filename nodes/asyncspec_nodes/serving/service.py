"""The draft node's text service: clients' requests in, text out.

Law of this file: a refused request has cost nothing, so its ``Finished`` has empty stats; that is
how a client knows that the request itself is to be changed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

from asyncspec.actor.machine import Cancelled, Emit, Finish, Request, Stopped, Submitted
from asyncspec_nodes.serving.likely import Speller, output
from asyncspec_nodes.serving.rules import Encoder, Refusal, Rules, prepare
from asyncspec_nodes.serving.stops import AnswerText
from asyncspec_nodes.serving.text import Codec
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.messages import Cancel, Finished, Output, Submit


class Client(Protocol):
    """Where answers go: a link. One that is gone swallows what it is sent."""

    def send(self, message: Output | Finished, /) -> object:
        """Queue a message."""


class TextCodec(Codec, Encoder, Speller, Protocol):
    """The whole tokenizer."""


class _LastPrompt:
    """An ``Encoder`` that reads a prompt once for all of its answers, which are asked for one after
    another: nothing else goes on while a tokenizer works."""

    def __init__(self, encoder: Encoder) -> None:
        self.encode = lru_cache(maxsize=1)(encoder.encode)
        self.render = lru_cache(maxsize=1)(encoder.render)


class _Answer:
    """A request that is being worked on."""

    def __init__(self, client: Client, submit: Submit, codec: Codec) -> None:
        self.client = client
        # The number the client gave it.
        self.number = submit.request
        self.text = AnswerText(codec, submit.stop, include=submit.include_stop)
        self.tops = submit.tops
        # Tokens the client was given, and whether a stop string has ended them.
        self.tokens = 0
        self.stopped = False


class TextService:
    """Requests of all clients of one draft node."""

    def __init__(
        self,
        codec: TextCodec,
        rules: Rules,
        feed: Callable[[Submitted | Cancelled | Stopped], None],
        *,
        most: int,
    ) -> None:
        self._codec = codec
        self._encoder = _LastPrompt(codec)
        self._rules = rules
        self._feed = feed
        # Requests at a time, those that wait included.
        self._most = most
        self._next = 0
        self._answers: dict[int, _Answer] = {}

    def client(self, client: Client, message: Submit | Cancel) -> None:
        """A client asks for something. Raises ``RemoteProtocolError`` for a number in use."""
        running = self._numbers(client)
        if isinstance(message, Cancel):
            if message.request in running:
                self._feed(Cancelled(running[message.request]))
            return
        if message.request in running:
            raise RemoteProtocolError(f"request {message.request} is still running")
        request = self._prepare(message)
        if isinstance(request, Refusal):
            client.send(Finished(message.request, "error", request.text, {}, request.code))
            return
        self._next += 1
        self._answers[request.request] = _Answer(client, message, self._codec)
        self._feed(Submitted(request))

    def client_gone(self, client: Client) -> None:
        """Nobody reads these answers any more."""
        for number in self._numbers(client).values():
            self._feed(Cancelled(number))

    def emit(self, effect: Emit) -> str:
        """Certain tokens for a user; the text they make."""
        answer = self._answers[effect.request]
        if answer.stopped:
            return ""  # the machine was at work on what follows before it could be told
        piece = answer.text.push(effect.tokens)
        answer.tokens += piece.tokens
        tokens, opinions = effect.tokens[: piece.tokens], effect.opinions[: piece.tokens]
        answer.client.send(
            output(answer.number, tokens, piece.text, opinions, answer.tops, self._codec)
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

    def _numbers(self, client: Client) -> dict[int, int]:
        """A client's running requests: its own number to ours."""
        return {a.number: n for n, a in self._answers.items() if a.client is client}

    def _prepare(self, submit: Submit) -> Request | Refusal:
        if len(self._answers) >= self._most:
            return Refusal(f"{self._most} requests are waiting already; try again later", "busy")
        return prepare(submit, self._next, self._rules, self._encoder)
