"""Streaming detokenization: pieces of text whose sum is exactly the decoded whole; stop strings.

A piece never ends inside a character and is never revised. Each call decodes a short window only,
so the cost per token does not grow with the answer. An answer that continues a prompt is decoded
behind its last tokens: SentencePiece's decoders strip the space before the first word of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import dropwhile, islice

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.backend.tokenizer import Tokenizer, conversation
from asyncspec_nodes.serving.templates import answer_markers
from asyncspec_protocol.clients import Submit

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What decoders return for an incomplete UTF-8 sequence."""

CONTEXT = 8
"""Prompt tokens that are decoded with an answer. One with text suffices for all known decoders; a
token may be a lone space, which some strip."""

CONTINUES = "continue_final_message"
"""Argument of ``apply_chat_template``: the prompt ends within the last message."""


class Detokenizer:
    """The text of one answer. ``after``: the tokens that it continues; none of a new message."""

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # Without special tokens.
        self._ids = _context(tokenizer, after)
        # ids[:complete] do not end within a run of byte tokens.
        self._complete = len(self._ids)
        # ids[start:done] are the context of the next piece, with the text ``before``: many decoders
        # treat the first token of a text differently.
        self._start = 0
        self._done = len(self._ids)
        self._before = tokenizer.decode(self._ids)
        # The text of the prompt's tokens, and the pieces.
        self._pieces = [self._before]

    def push(self, tokens: Sequence[int]) -> str:
        """Append tokens; returns the text that has become final, which may be empty."""
        for token in tokens:
            if self._tokenizer.is_special(token):
                continue
            self._ids.append(token)
            if not self._tokenizer.is_byte(token):
                self._complete = len(self._ids)
        end = self._complete
        if self._tokenizer.decodes_as_whole or end <= self._done:
            return ""
        text = self._tokenizer.decode(self._ids[self._start : end])
        if text.endswith(UNFINISHED) or not text.startswith(self._before):
            return ""
        if piece := text[len(self._before) :]:
            self._start, self._done = self._done, end
            self._before = self._tokenizer.decode(self._ids[self._start : end])
            self._pieces.append(piece)
        return piece

    def open(self) -> str:
        """The text behind the pieces if the answer ended here, without an incomplete character.
        Decodes the whole answer where the tokenizer ``decodes_as_whole``."""
        if self._done == len(self._ids):
            return ""
        text = self._tokenizer.decode(self._ids[self._start :]).rstrip(UNFINISHED)
        return text.removeprefix(self._before) if text.startswith(self._before) else ""

    def finish(self) -> str:
        """The text behind the pieces at the end of the answer."""
        pieces = "".join(self._pieces)
        whole = self._tokenizer.decode(self._ids)
        return whole[len(pieces) :] if whole.startswith(pieces) else ""


class MarkedDetokenizer:
    """As ``Detokenizer``, with the names of the special tokens in ``markers``, where a model
    structures its answer by special tokens (gpt-oss)."""

    def __init__(self, tokenizer: Tokenizer, markers: frozenset[str]) -> None:
        self._tokenizer = tokenizer
        self._markers = markers
        self._part = Detokenizer(tokenizer)

    def push(self, tokens: Sequence[int]) -> str:
        text = ""
        for token in tokens:
            if (name := self._marker(token)) is None:
                text += self._part.push((token,))
            else:
                text += self._part.finish() + name
                self._part = Detokenizer(self._tokenizer)
        return text

    def open(self) -> str:
        return self._part.open()

    def finish(self) -> str:
        return self._part.finish()

    def _marker(self, token: int) -> str | None:
        if not self._tokenizer.is_special(token):
            return None
        name = self._tokenizer.spell(token).decode(errors="replace")
        return name if name in self._markers else None


def _context(tokenizer: Tokenizer, after: Sequence[int]) -> list[int]:
    """The last tokens of ``after`` whose text does not depend on what follows: the answer may go on
    with a run of byte tokens, or with a character."""
    if tokenizer.decodes_as_whole:
        return []
    visible = (token for token in reversed(after) if not tokenizer.is_special(token))
    context = list(islice(dropwhile(tokenizer.is_byte, visible), CONTEXT))[::-1]
    while context and (
        tokenizer.is_byte(context[-1]) or tokenizer.decode(context).endswith(UNFINISHED)
    ):
        context.pop()
    return context


class StopMatch(Struct, frozen=True):
    """A stop string in a text: text[start:end]."""

    start: int
    end: int


def find(text: str, stops: Sequence[str]) -> StopMatch | None:
    """The stop string that is complete first; of several, the longest."""
    matches = [StopMatch(i, i + len(stop)) for stop in stops if (i := text.find(stop)) >= 0]
    return min(matches, key=lambda f: (f.end, f.start), default=None)


def partial_stop_length(text: str, stops: Sequence[str]) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of a stop string."""
    longest = max(map(len, stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(stop.startswith(end) for stop in stops):
            return length
    return 0


class Piece(Struct, frozen=True):
    """Text to show, and how many of the pushed tokens it takes. ``stop``: the stop string that ends
    the answer there, if one does."""

    text: str
    tokens: int
    stop: str = ""

    @property
    def stopped(self) -> bool:
        """By a stop string."""
        return bool(self.stop)


class AnswerText:
    """The text of one answer up to its stop string. ``after``: see ``Detokenizer``.

    An answer ends with the first character that completes a stop string, at the first token whose
    text has that character, so neither text nor tokens depend on how tokens are grouped. Text that
    may begin a stop string is held until that is decided.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        include: bool = False,
        after: Sequence[int] = (),
        markers: frozenset[str] = frozenset(),
    ) -> None:
        """``markers``: special tokens that are part of the text, of answers that continue none."""
        self._text = (
            MarkedDetokenizer(tokenizer, markers) if markers else Detokenizer(tokenizer, after)
        )
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, tokens: Sequence[int]) -> Piece:
        """Append tokens. Nothing may follow a ``stopped`` piece."""
        if not self._stops:
            return Piece(self._text.push(tokens), len(tokens))
        text = ""
        for count, token in enumerate(tokens, start=1):
            self._held += self._text.push((token,))
            # With ``open``: as if this token were the last.
            if end := self._end(self._held + self._text.open(), count):
                return replace(end, text=text + end.text)
            cut = len(self._held) - partial_stop_length(self._held, self._stops)
            text += self._held[:cut]
            self._held = self._held[cut:]
        return Piece(text, len(tokens))

    def finish(self) -> Piece:
        """The rest of the text."""
        rest = self._held + self._text.finish()
        return self._end(rest, 0) or Piece(rest, 0)

    def _end(self, text: str, tokens: int) -> Piece | None:
        """``text`` as far as the answer goes, if it has a stop string."""
        if (match := find(text, self._stops)) is None:
            return None
        until = match.end if self._include else match.start
        return Piece(text[:until], tokens, text[match.start : match.end])


def answer_text(tokenizer: Tokenizer, submit: Submit, prompt: Sequence[int]) -> AnswerText:
    """The text of an answer to ``submit``, whose prompt is the tokens ``prompt``."""
    markers = answer_markers(tokenizer.template) if submit.chat else frozenset()
    after = prompt if _continues(submit) else ()
    return AnswerText(
        tokenizer, submit.stop, include=submit.include_stop, after=after, markers=markers
    )


def _continues(submit: Submit) -> bool:
    """Whether the answer goes on with a text, or with the last message of a chat."""
    if not submit.chat:
        return True
    # Long conversations are not read once more for nothing.
    if CONTINUES not in submit.chat:
        return False
    _, _, options = conversation(submit.chat)
    return bool(options.get(CONTINUES))
