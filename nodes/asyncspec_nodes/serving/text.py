"""Certain tokens in, certain text out: pieces whose sum is exactly the decoded whole.

A piece never ends inside a character, and what was given is never taken back. Each call decodes a
short window only, so the cost per token does not grow with the answer.

The whole is what the answer adds to the text before it: SentencePiece's decoders take the space off
the first word of a text, and an answer that goes on a prompt does not begin one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Protocol

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a decoder gives for a character whose last bytes are still to come."""

CONTEXT = 8
"""Tokens of the prompt that are decoded with an answer. One with text would do for all decoders
known; a token may be a lone space, of which the decoder leaves nothing."""


class Codec(Protocol):
    """The target's tokenizer."""

    @property
    def reshapes(self) -> bool:
        """True where later tokens may change the text of earlier ones at any distance."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens, special ones left out."""

    def is_left_out(self, token: int) -> bool:
        """True for a special token, of which ``decode`` takes no notice."""

    def is_loose(self, token: int) -> bool:
        """True for a token that is one raw byte, which means nothing until the run of bytes
        ends."""


class Detokenizer:
    """One answer on its way to a user. ``after``: the tokens it goes on; none where it is a text of
    its own, as what the assistant says in a chat is."""

    def __init__(self, codec: Codec, after: Sequence[int] = ()) -> None:
        self._codec = codec
        # Those that are not left out.
        self._ids = _context(codec, after)
        # ids[:firm] end with no run of bytes.
        self._firm = len(self._ids)
        # ids[start:done] were given as ``before``; they stay as context, because many decoders
        # treat the first token of a text differently from the others.
        self._start = 0
        self._done = len(self._ids)
        self._before = codec.decode(self._ids)
        # The context's text, which is not the answer's, and the pieces.
        self._given = [self._before]

    def push(self, tokens: Sequence[int]) -> str:
        """Text that has become certain with ``tokens``; may be empty."""
        for token in tokens:
            if self._codec.is_left_out(token):
                continue
            self._ids.append(token)
            if not self._codec.is_loose(token):
                self._firm = len(self._ids)
        end = self._firm
        if self._codec.reshapes or end <= self._done:
            return ""
        text = self._codec.decode(self._ids[self._start : end])
        if text.endswith(UNFINISHED) or not text.startswith(self._before):
            return ""
        piece = text[len(self._before) :]
        if piece:
            self._start, self._done = self._done, end
            self._before = self._codec.decode(self._ids[self._start : end])
            self._given.append(piece)
        return piece

    def open(self) -> str:
        """What would follow the text given so far if no more tokens came; without an unfinished
        character at its end. Costs a look at the whole answer where the tokenizer reshapes."""
        if self._done == len(self._ids):
            return ""
        text = self._codec.decode(self._ids[self._start :]).rstrip(UNFINISHED)
        return text.removeprefix(self._before) if text.startswith(self._before) else ""

    def finish(self) -> str:
        """What was held back, now that no more tokens come."""
        given = "".join(self._given)
        whole = self._codec.decode(self._ids)
        return whole[len(given) :] if whole.startswith(given) else ""


def _context(codec: Codec, after: Sequence[int]) -> list[int]:
    """The last tokens of ``after``, in whose text an answer can change nothing any more."""
    if codec.reshapes:
        return []
    shown = (token for token in reversed(after) if not codec.is_left_out(token))
    context = list(islice(shown, CONTEXT))[::-1]
    open_end = context and (
        codec.is_loose(context[-1]) or codec.decode(context).endswith(UNFINISHED)
    )
    return [] if open_end else context
