"""N-gram lookup: what followed the same few tokens earlier in this text."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from asyncspec.source.lookup import LookupSource, LookupText


class _Text(LookupText):
    """Tokens, and for every n-gram in them what has followed."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        self._lengths = lengths
        self._next: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def note(self, token: int) -> None:
        for length in self._lengths:
            if length <= len(self.tokens):
                self._next[tuple(self.tokens[-length:])][token] += 1

    def match(self, path: tuple[int, ...]) -> tuple[int, Counter[int]]:
        longest = self._lengths[0]
        end = (*self.tokens[-longest:], *path)[-longest:]
        for length in self._lengths:
            if length <= len(end) and (seen := self._next.get(end[-length:])):
                return length, seen
        return 0, Counter()


class NGramSource(LookupSource[_Text]):
    """N-gram lookup in the session's own text (prompt and answer). A guess is made only after at
    least ``shortest`` tokens have matched."""

    def __init__(self, shortest: int = 2, longest: int = 6) -> None:
        lengths = range(longest, shortest - 1, -1)
        super().__init__(lambda _: _Text(lengths))
