"""A token source without a model: what followed the same few tokens earlier in this text.

Good where an answer copies (code, summaries, quotations), silent elsewhere: a guess is made only
after at least ``shortest`` tokens have matched. Pure.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from asyncspec.jobs import Release, SourceJob
from asyncspec.source.grow import NOTHING, PathGrower, Proposal, answer
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Expand, Expanded

# How far a continuation is trusted after a match of so many tokens; longer ones as the last.
TRUST = {1: 0.2, 2: 0.35, 3: 0.55, 4: 0.7}


class NGramSource:
    """A ``TokenSource``: n-gram lookup in the session's own text (prompt and answer)."""

    def __init__(self, shortest: int = 2, longest: int = 4) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._sessions: dict[SessionId, _Text] = {}

    def run(self, job: SourceJob) -> Expanded | None:
        """See ``TokenSource``."""
        if isinstance(job, Release):
            self._sessions.pop(job.session, None)
            return None
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
    """A session's tokens, and for every n-gram in it what has followed."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._lengths = lengths
        self._next: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            for length in self._lengths:
                if length <= len(self.tokens):
                    self._next[tuple(self.tokens[-length:])][token] += 1
            self.tokens.append(token)

    def propose(self, path: tuple[int, ...], width: int) -> Proposal:
        """What followed the longest known end of the text and ``path``, most frequent first."""
        longest = self._lengths[0]
        end = (*self.tokens[-longest:], *path)[-longest:]
        for length in self._lengths:
            if length <= len(end) and (seen := self._next.get(end[-length:])):
                best = seen.most_common(width)
                trust = TRUST.get(length, TRUST[4]) / seen.total()
                return [t for t, _ in best], [math.log(trust * count) for _, count in best]
        return NOTHING
