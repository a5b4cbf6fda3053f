"""Stop strings: where an answer's text ends, whatever the borders of tokens and emissions.

Text counts character by character: an answer ends with the first character that completes a stop
string, at the first token whose text has that character. So neither text nor tokens depend on how
tokens came, and what is shown is never taken back: text that may be the beginning of a stop string
is held until that is decided. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from asyncspec_nodes.serving.text import Codec, Detokenizer
from asyncspec_protocol.requests import Submit


class Found(Struct, frozen=True):
    """A stop string in a text: text[start:end]."""

    start: int
    end: int


def find(text: str, stops: Sequence[str]) -> Found | None:
    """The stop string that is complete first; of several, the longest."""
    found = [Found(i, i + len(stop)) for stop in stops if (i := text.find(stop)) >= 0]
    return min(found, key=lambda f: (f.end, f.start), default=None)


def beginning(text: str, stops: Sequence[str]) -> int:
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
        cut = len(self._held) - beginning(self._held, self._stops)
        free, self._held = self._held[:cut], self._held[cut:]
        return free


def answer_text(codec: Codec, submit: Submit, prompt: Sequence[int]) -> AnswerText:
    """The text of an answer to ``submit``, whose prompt is the tokens ``prompt``."""
    after = () if submit.chat else prompt
    return AnswerText(codec, submit.stop, include=submit.include_stop, after=after)
