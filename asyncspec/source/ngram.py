"""A token source without a model: what followed the same few tokens earlier in this text.

Good where an answer copies (code, summaries, quotations), silent elsewhere: a guess is made only
after at least ``shortest`` tokens have matched. Its chance is the share of earlier matches of that
length, in prompt and answer, whose next token was among the guesses.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from msgspec import Struct

from asyncspec.source.base import StateSource
from asyncspec.source.expand import NO_PROPOSAL, Grower, Proposal, path_grower
from asyncspec_protocol.messages import Expand

PRIOR_CHANCES = {1: 0.2, 2: 0.35, 3: 0.55, 4: 0.7}
"""Of a continuation after a match of so many tokens, before any is counted; longer as the last."""

PRIOR_MATCHES = 4.0
"""Weight of ``PRIOR_CHANCES``, in matches."""

DECAY = 0.97
"""Of the counts with every match: an answer may copy where its prompt did not."""


class MatchRate(Struct, frozen=True):
    """How often one of the guesses was right, after matches of one length."""

    matches: float = 0.0
    right: float = 0.0

    def chance(self, length: int) -> float:
        """That one of them is right this time."""
        prior = PRIOR_CHANCES.get(length, PRIOR_CHANCES[max(PRIOR_CHANCES)])
        return (self.right + PRIOR_MATCHES * prior) / (self.matches + PRIOR_MATCHES)

    def counted(self, *, right: bool) -> MatchRate:
        """With one match more."""
        return MatchRate(DECAY * self.matches + 1, DECAY * self.right + right)


class _Text:
    """A session's tokens, for every n-gram in it what has followed, and how well that foretells."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._lengths = lengths
        self._next: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        self._rates: defaultdict[int, MatchRate] = defaultdict(MatchRate)

    def append(self, token: int) -> _Text:
        """Itself, one token longer."""
        length, seen = self._match(())
        if length:
            self._rates[length] = self._rates[length].counted(right=token in seen)
        for length in self._lengths:
            if length <= len(self._tokens):
                self._next[tuple(self._tokens[-length:])][token] += 1
        self._tokens.append(token)
        return self

    def propose(self, path: tuple[int, ...], width: int) -> Proposal:
        """What followed the longest known end of the text and ``path``, most frequent first."""
        length, seen = self._match(path)
        if not length:
            return NO_PROPOSAL
        best = seen.most_common(width)
        chance = self._rates[length].chance(length) / seen.total()
        return [t for t, _ in best], [math.log(chance * count) for _, count in best]

    def _match(self, path: tuple[int, ...]) -> tuple[int, Counter[int]]:
        """The longest known end of the text and ``path``, and what followed it; 0 if none is."""
        longest = self._lengths[0]
        end = (*self._tokens[-longest:], *path)[-longest:]
        for length in self._lengths:
            if length <= len(end) and (seen := self._next.get(end[-length:])):
                return length, seen
        return 0, Counter()


class NGramSource(StateSource[_Text]):
    """N-gram lookup in the session's own text (prompt and answer)."""

    def __init__(self, shortest: int = 2, longest: int = 6) -> None:
        lengths = range(longest, shortest - 1, -1)
        super().__init__(lambda: _Text(lengths), _Text.append)

    def grower(self, job: Expand) -> Grower:
        _, text = self._sessions[job.session]
        return path_grower(text.propose)
