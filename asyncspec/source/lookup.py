"""Token sources without a model: what followed the same tokens before, in a text.

Good where an answer copies (code, summaries, quotations), silent elsewhere. The chance of a guess
is the share of earlier matches of the same length, in prompt and answer, whose next token was among
the guesses.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Generic, TypeVar

from msgspec import Struct

from asyncspec.source.base import StateSource
from asyncspec.source.expand import NO_PROPOSAL, Grower, Proposal, path_grower
from asyncspec_protocol.messages import Expand

PRIOR_CHANCES = {1: 0.2, 2: 0.35, 3: 0.55, 4: 0.7}
"""Prior acceptance probability by the length of the match in tokens; longer ones as the last."""

PRIOR_MATCHES = 4.0
"""Weight of ``PRIOR_CHANCES``, in matches."""

DECAY = 0.97
"""Factor of the counts with every match: an answer may copy where its prompt did not."""

OWN_RATES = 6
"""Matches up to this length have a rate each; of longer ones, those of 7 to 15 tokens, 16 to 31 and
so on have one together."""


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


class LookupText(ABC):
    """A session's tokens, what has followed their end before, and how well that foretells."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._rates: defaultdict[int, MatchRate] = defaultdict(MatchRate)

    @abstractmethod
    def match(self, path: tuple[int, ...]) -> tuple[int, Counter[int]]:
        """The length of the longest known end of the text and ``path``, and what followed it; 0 if
        none is known."""

    @abstractmethod
    def note(self, token: int) -> None:
        """Remember that ``token`` follows ``tokens``."""

    def append(self, token: int) -> None:
        """One token more."""
        length, seen = self.match(())
        if length:
            rate = _rate(length)
            self._rates[rate] = self._rates[rate].counted(right=token in seen)
        self.note(token)
        self.tokens.append(token)

    def propose(self, path: tuple[int, ...], width: int) -> Proposal:
        """What followed the longest known end of the text and ``path``, most frequent first."""
        length, seen = self.match(path)
        if not length:
            return NO_PROPOSAL
        best = seen.most_common(width)
        chance = self._rates[_rate(length)].chance(length) / seen.total()
        return [t for t, _ in best], [math.log(chance * count) for _, count in best]


def _rate(length: int) -> int:
    return length if length <= OWN_RATES else max(OWN_RATES + 1, 1 << (length.bit_length() - 1))


T = TypeVar("T", bound=LookupText)


class LookupSource(StateSource[T], Generic[T]):
    """A source over texts."""

    def __init__(self, start: Callable[[Expand], T]) -> None:
        """``start``: the empty text of the session that a request opens."""
        super().__init__(start, _extended)

    def grower(self, job: Expand) -> Grower:
        _, text = self._sessions[job.session]
        return path_grower(text.propose)


def _extended(text: T, token: int) -> T:
    text.append(token)
    return text
