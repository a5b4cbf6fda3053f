"""N-gram lookup: what followed the same few tokens earlier in this text."""

from __future__ import annotations

from collections import Counter

from asyncspec.source.lookup import LookupSource, LookupText
from asyncspec.source.registry import SourceKind

TOKEN_BYTES = 320
"""Memory of a token of a session: of code, prose and numbers without order it is less."""


class _Text(LookupText):
    """Tokens, and for every n-gram in them what has followed.

    Most n-grams have one continuation behind one longest context. That holds for all longer ones
    that end there too, so only the shortest of them is kept, as a position in the text.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        super().__init__()
        self._shortest, self._longest = shortest, longest
        # By n-gram, where the only token stands that follows it, or how often each one does.
        self._next: dict[tuple[int, ...], int | Counter[int]] = {}
        # How often more a position's context and token have occurred.
        self._repeats: Counter[int] = Counter()

    def note(self, token: int) -> None:
        tokens, at = self.tokens, len(self.tokens)
        for length in range(self._shortest, min(self._longest, at) + 1):
            run = tuple(tokens[at - length :])
            entry = self._next.get(run)
            if entry is None:
                self._next[run] = at
                return
            if isinstance(entry, int):
                if tokens[entry] == token and self._context(entry) == self._context(at):
                    self._repeats[entry] += 1
                    return
                entry = self._split(run, entry)
            entry[token] += 1

    def match(self, path: tuple[int, ...]) -> tuple[int, Counter[int]]:
        end = (*self.tokens[-self._longest :], *path)[-self._longest :]
        best: tuple[int, Counter[int]] = 0, Counter()
        for length in range(self._shortest, len(end) + 1):
            entry = self._next.get(end[-length:])
            if entry is None:
                break
            if isinstance(entry, int):
                return self._matched(end, length, entry), self._counts(entry)
            best = length, entry
        return best

    def _context(self, at: int) -> list[int]:
        return self.tokens[max(0, at - self._longest) : at]

    def _counts(self, at: int) -> Counter[int]:
        return Counter({self.tokens[at]: 1 + self._repeats[at]})

    def _split(self, run: tuple[int, ...], at: int) -> Counter[int]:
        """Count what follows an n-gram of which only the token at ``at`` was known, and keep that
        one's context as a longer n-gram, if there is one."""
        counts = self._next[run] = self._counts(at)
        if len(run) < min(self._longest, at):
            self._next[tuple(self.tokens[at - len(run) - 1 : at])] = at
        else:
            self._repeats.pop(at, None)
        return counts

    def _matched(self, end: tuple[int, ...], length: int, at: int) -> int:
        """How many tokens before ``at`` are the last ones of ``end``, as the last ``length``
        are."""
        while length < min(len(end), at) and self.tokens[at - length - 1] == end[-length - 1]:
            length += 1
        return length


class NGramSource(LookupSource[_Text]):
    """N-gram lookup in the session's own text (prompt and answer). A guess is made only after at
    least ``shortest`` tokens have matched."""

    def __init__(self, shortest: int = 2, longest: int = 6) -> None:
        super().__init__(lambda _: _Text(shortest, longest))


NGRAM = SourceKind(make=NGramSource, token_bytes=TOKEN_BYTES)
