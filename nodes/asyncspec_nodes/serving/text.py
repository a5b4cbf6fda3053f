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

from msgspec import Struct

from asyncspec_protocol.clients import Submit

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


# --- Stop strings: where an answer's text ends, whatever the borders of tokens and emissions.
# Text counts character by character: an answer ends with the first character that completes a
# stop string, at the first token whose text has that character. So neither text nor tokens depend
# on how tokens came, and what is shown is never taken back: text that may be the beginning of a
# stop string is held until that is decided. Pure.


class StopMatch(Struct, frozen=True):
    """A stop string in a text: text[start:end]."""

    start: int
    end: int


def find(text: str, stops: Sequence[str]) -> StopMatch | None:
    """The stop string that is complete first; of several, the longest."""
    found = [StopMatch(i, i + len(stop)) for stop in stops if (i := text.find(stop)) >= 0]
    return min(found, key=lambda f: (f.end, f.start), default=None)


def partial_stop_length(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that a stop string could begin with."""
    longest = max(map(len, stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(stop.startswith(end) for stop in stops):
            return length
    return 0


class Piece(Struct, frozen=True):
    """What has become of some tokens of an answer."""

    # For the user, now.
    text: str
    # The first so many of them are part of the answer.
    tokens: int
    # A stop string is complete: this was the end.
    stopped: bool = False


class AnswerText:
    """The text of one answer up to a stop string, piece by piece. ``after``: see
    ``Detokenizer``."""

    def __init__(
        self,
        codec: Codec,
        stops: Sequence[str] = (),
        *,
        include: bool = False,
        after: Sequence[int] = (),
    ) -> None:
        self._text = Detokenizer(codec, after)
        self._stops = tuple(stops)
        self._include = include
        # Certain text that may be the beginning of a stop string.
        self._held = ""

    def push(self, tokens: Sequence[int]) -> Piece:
        """Certain tokens. Nothing may follow the piece that is ``stopped``."""
        if not self._stops:
            return Piece(self._text.push(tokens), len(tokens))
        text = ""
        for count, token in enumerate(tokens, start=1):
            self._held += self._text.push((token,))
            # If the answer ends with this token, then its text is all that this token means.
            if (end := self._end(self._held + self._text.open())) is not None:
                return Piece(text + end, count, stopped=True)
            text += self._release()
        return Piece(text, len(tokens))

    def finish(self) -> Piece:
        """What was held back, now that no more tokens come."""
        rest = self._held + self._text.finish()
        end = self._end(rest)
        return Piece(rest, 0) if end is None else Piece(end, 0, stopped=True)

    def _end(self, text: str) -> str | None:
        """The last text of the answer if a stop string is in it."""
        found = find(text, self._stops)
        return None if found is None else text[: found.end if self._include else found.start]

    def _release(self) -> str:
        """Held text that is the beginning of nothing."""
        cut = len(self._held) - partial_stop_length(self._held, self._stops)
        free, self._held = self._held[:cut], self._held[cut:]
        return free


def answer_text(codec: Codec, submit: Submit, prompt: Sequence[int]) -> AnswerText:
    """The text of an answer to ``submit``, whose prompt is the tokens ``prompt``."""
    after = () if submit.chat else prompt
    return AnswerText(codec, submit.stop, include=submit.include_stop, after=after)
