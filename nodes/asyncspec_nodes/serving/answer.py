"""A running answer: its tokens become text, and the messages that its client gets. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from asyncspec.backend.tokenizer import Tokenizer
from asyncspec.core.tensors import WireTensor
from asyncspec_nodes.serving.requests import AnswerMatcher
from asyncspec_nodes.serving.text import Piece, answer_text
from asyncspec_protocol.messages import Finished, Output, Submit

_MESSAGE = 1 << 20
"""Characters of an ``Output``: four bytes each are half of a frame's header at most."""
_MESSAGE_TOKENS = 1 << 16


class ResponseSink(Protocol):
    """Receives a request's answer; ignores messages once its link is gone."""

    def send(self, message: Output | Finished, tensor: WireTensor | None = None, /) -> object:
        """Queue a message."""


class Answer:
    """A running request."""

    def __init__(
        self,
        client: ResponseSink,
        submit: Submit,
        prompt: Sequence[int],
        tokenizer: Tokenizer,
        matcher: AnswerMatcher | None,
    ) -> None:
        self.client = client
        # Matcher of its grammar.
        self.matcher = matcher
        # The client's request number.
        self.number = submit.request
        self.id = submit.id
        self.text = answer_text(tokenizer, submit, prompt)
        self.top_logprobs = submit.top_logprobs
        # Sent before the answer, which a client that has some of it has seen.
        self.echo = () if submit.given or not submit.echo else prompt
        self.text_lengths = submit.text_lengths
        # Tokens of the prompt, until they are sent.
        self.prompt_tokens = len(prompt)
        # Tokens sent, and the stop string that has ended the answer.
        self.tokens = 0
        self.stop = ""
        # Characters of the text to come that the client has.
        self._known = submit.given_text

    def push(self, tokens: Sequence[int]) -> Piece:
        """Append tokens; the text to send."""
        if self.matcher is not None:
            self.matcher.commit(tokens)
        return self.begin(tokens)

    def begin(self, tokens: Sequence[int]) -> Piece:
        """As ``push``, with tokens that its grammar has been told of."""
        piece = self.text.push(tokens)
        self.tokens += piece.tokens
        return self._unknown(piece)

    def push_each(self, tokens: Sequence[int]) -> tuple[Piece, tuple[int, ...]]:
        """As ``push``, with the characters that each token adds, if they are wanted."""
        if not self.text_lengths:
            return self.push(tokens), ()
        text, count, lengths, stop = "", 0, [], ""
        for token in tokens:
            piece = self.push((token,))
            text, count, stop = text + piece.text, count + piece.tokens, piece.stop
            lengths.append(len(piece.text))
            if piece.stopped:
                break
        return Piece(text, count, stop), tuple(lengths[:count])

    def finish(self) -> Piece:
        """The rest of the text."""
        return self._unknown(self.text.finish())

    def _unknown(self, piece: Piece) -> Piece:
        if not self._known:
            return piece
        text = piece.text[self._known :]
        self._known = max(0, self._known - len(piece.text))
        return Piece(text, piece.tokens, piece.stop)


def progress_of(number: int, prompt: int, shared: int, read: int) -> Output:
    """How much of a prompt has been read."""
    return Output(
        number, (), "", prompt_tokens=prompt, shared_tokens=shared, prompt_read=min(read, prompt)
    )


def outputs(number: int, tokens: Sequence[int], text: str) -> Iterator[Output]:
    """As many messages as their frames' bound asks for; none of nothing."""
    count = max(-(-len(text) // _MESSAGE), -(-len(tokens) // _MESSAGE_TOKENS))
    for i in range(count):
        some = tokens[i * _MESSAGE_TOKENS : (i + 1) * _MESSAGE_TOKENS]
        yield Output(number, tuple(some), text[i * _MESSAGE : (i + 1) * _MESSAGE])
