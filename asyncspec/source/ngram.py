"""A token source without a model: what followed the same few tokens earlier in this text.

Good where an answer copies (code, summaries, quotations), silent elsewhere: a guess is made only
after at least ``shortest`` tokens have matched. How far it is trusted the text itself has shown,
prompt and answer: wherever so many tokens matched before, what followed was among the guesses or
not. Pure.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from msgspec import Struct

from asyncspec.core.jobs import DraftBatch, DraftResult, Release, SourceJob
from asyncspec.source.batch import one_by_one
from asyncspec.source.expand import NOTHING, PathGrower, Proposal, answer
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Expand, Expanded

# How far a continuation is trusted after a match of so many tokens, before any such match was seen
# to be right or wrong; longer ones as the last.
TRUST = {1: 0.2, 2: 0.35, 3: 0.55, 4: 0.7}

PRIOR = 4.0
"""Matches' worth of belief in ``TRUST``."""

FADING = 0.97
"""What stays of the counts with every match: an answer may copy where its prompt did not."""


class Rate(Struct, frozen=True):
    """How often one of the guesses was right, after matches of one length."""

    matches: float = 0.0
    right: float = 0.0

    def trust(self, length: int) -> float:
        """The chance that one of them is right this time."""
        first = TRUST.get(length, TRUST[max(TRUST)])
        return (self.right + PRIOR * first) / (self.matches + PRIOR)

    def counted(self, *, right: bool) -> Rate:
        """With one match more."""
        return Rate(FADING * self.matches + 1, FADING * self.right + right)


class NGramSource:
    """A ``TokenSource``: n-gram lookup in the session's own text (prompt and answer)."""

    def __init__(self, shortest: int = 2, longest: int = 6) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._sessions: dict[SessionId, _Text] = {}

    def run(self, job: SourceJob) -> DraftResult | None:
        """See ``TokenSource``."""
        if isinstance(job, Release):
            self._sessions.pop(job.session, None)
            return None
        if isinstance(job, DraftBatch):
            return one_by_one(self._answer, job)
        return self._answer(job)

    def _answer(self, job: Expand) -> Expanded:
        length = self.begin(job)
        return answer(self.grower(job), job, length)

    def begin(self, job: Expand) -> int:
        """See ``Part``."""
        text = self._sessions.setdefault(job.session, _Text(self._lengths))
        if len(text.tokens) != job.base:
            raise ValueError(f"the source knows {len(text.tokens)} tokens, not {job.base}")
        text.extend(job.committed)
        return len(text.tokens)

    def grower(self, job: Expand) -> PathGrower:
        """See ``Part``."""
        return PathGrower(self._sessions[job.session].propose)

    def abandon(self, job: SourceJob) -> None:
        """See ``TokenSource``. A lookup is over before it could be stopped."""


class _Text:
    """A session's tokens, for every n-gram in it what has followed, and how well that foretells."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._lengths = lengths
        self._next: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        self._rates: dict[int, Rate] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            length, seen = self._match(())
            if length:
                self._rates[length] = self._rate(length).counted(right=token in seen)
            for length in self._lengths:
                if length <= len(self.tokens):
                    self._next[tuple(self.tokens[-length:])][token] += 1
            self.tokens.append(token)

    def propose(self, path: tuple[int, ...], width: int) -> Proposal:
        """What followed the longest known end of the text and ``path``, most frequent first."""
        length, seen = self._match(path)
        if not length:
            return NOTHING
        best = seen.most_common(width)
        trust = self._rate(length).trust(length) / seen.total()
        return [t for t, _ in best], [math.log(trust * count) for _, count in best]

    def _match(self, path: tuple[int, ...]) -> tuple[int, Counter[int]]:
        """The longest known end of the text and ``path``, and what followed it; 0 if none is."""
        longest = self._lengths[0]
        end = (*self.tokens[-longest:], *path)[-longest:]
        for length in self._lengths:
            if length <= len(end) and (seen := self._next.get(end[-length:])):
                return length, seen
        return 0, Counter()

    def _rate(self, length: int) -> Rate:
        return self._rates.get(length) or Rate()
