"""Two vocabularies side by side: tokens of one as tokens of the other that say the same text.

Where the strings of two tokens agree, one stands for the other. What only one vocabulary has as a
token is spelled in several of the other, and several tokens become one where together they are a
string that only the other vocabulary has (universal assisted generation; TLI, arXiv:2502.05202).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

Tokens = tuple[int, ...]


class Vocabulary:
    """The texts of a model's tokens.

    Arguments:
        texts: bytes by token; empty for tokens that are no text.
        special: tokens that are no text, by name.
    """

    def __init__(self, texts: Sequence[bytes], special: Mapping[bytes, int]) -> None:
        self.texts = texts
        self.special = special
        self.names = {token: name for name, token in special.items()}
        self.ids: dict[bytes, int] = {}
        # Length of the longest text by its first two bytes; of one byte's by that.
        self._longest: dict[bytes, int] = {}
        for token, text in enumerate(texts):
            if text and text not in self.ids:
                self.ids[text] = token
                self._longest[text[:2]] = max(len(text), self._longest.get(text[:2], 0))

    def text(self, token: int) -> bytes:
        """Empty for what is no text, and beyond the vocabulary."""
        return self.texts[token] if 0 <= token < len(self.texts) else b""

    def matches(self, text: bytes, start: int) -> list[bytes]:
        """Tokens' texts that ``text`` goes on with at ``start``, the longest first."""
        longest = self._longest.get(text[start : start + 2], 1)
        ends = range(min(len(text), start + longest), start, -1)
        return [part for end in ends if (part := text[start:end]) in self.ids]


class Retokeniser:
    """From tokens of ``source`` to those of ``into``."""

    def __init__(self, source: Vocabulary, into: Vocabulary) -> None:
        self.source, self.into = source, into
        self._only_there = sorted(into.ids.keys() - source.ids.keys())
        self._each: dict[int, Tokens] = {}
        self._whole: dict[int, Tokens] = {}

    def only_there(self, text: bytes) -> int | None:
        """The token of ``into`` for a text that is none of ``source``'s."""
        return None if text in self.source.ids else self.into.ids.get(text)

    def goes_on(self, text: bytes) -> bool:
        """Whether a longer text that ``source`` has no token for begins with ``text``."""
        at = bisect_right(self._only_there, text)
        return at < len(self._only_there) and self._only_there[at].startswith(text)

    @property
    def agreeing(self) -> float:
        """The share of the source's tokens that are tokens there."""
        texts = self.source.ids.keys()
        return len(texts & self.into.ids.keys()) / max(1, len(texts))

    def each(self, tokens: Sequence[int]) -> Tokens:
        """What says the same, token by token: however a text is cut, it becomes the same. Special
        tokens become those of their names; what has none there, and bytes that no token there has,
        are left out."""
        return tuple(said for token in tokens for said in self._said(token))

    def whole(self, token: int) -> Tokens:
        """What says the same as one token, and all of it; else nothing."""
        if token not in self._whole:
            said = self._said(token)
            spelled = b"".join(self.into.text(other) for other in said)
            complete = token in self.source.names or spelled == self.source.text(token)
            self._whole[token] = said if complete else ()
        return self._whole[token]

    def tokens(self, tokens: Sequence[int]) -> Tokens:
        """As ``each``, of tokens of text alone; several become one where only that has a token
        there."""
        return self._spelled([self.source.text(token) for token in tokens])

    def _said(self, token: int) -> Tokens:
        if token not in self._each:
            name = self.source.names.get(token)
            if name is None:
                said = self._spelled([self.source.text(token)])
            else:
                said = (self.into.special[name],) if name in self.into.special else ()
            self._each[token] = said
        return self._each[token]

    def _spelled(self, pieces: Sequence[bytes]) -> Tokens:
        """Tokens for texts in a row."""
        text, starts, at = b"".join(pieces), dict[int, bytes](), 0
        for piece in pieces:
            if piece:
                starts[at] = piece
            at += len(piece)
        said: list[int] = []
        at = 0
        while at < len(text):
            match = self._match(text, at, starts.get(at))
            if match:
                said.append(self.into.ids[match])
            at += len(match) or 1
        return tuple(said)

    def _match(self, text: bytes, at: int, piece: bytes | None) -> bytes:
        """The token's text to say next; empty where there is none. ``piece``: that of the source's
        token which begins there. A text that both have as a token was spelled otherwise on purpose,
        and is only taken where nothing else fits."""
        matches = self.into.matches(text, at)
        fits = (
            match
            for match in matches
            if piece is None or match == piece or match not in self.source.ids
        )
        return next(fits, matches[0] if matches else b"")
