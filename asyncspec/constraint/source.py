"""A token source whose proposals a grammar allows, whatever proposes them.

The target draws from the tokens that its grammar allows after each node, so a child that it does
not allow is never accepted, and costs its row. Where it allows few tokens (a key, a bracket) they
are proposed even if the source does not think of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from asyncspec.constraint.grammar import Grammars, PathMatcher
from asyncspec.core.jobs import FeatureJob, Feed
from asyncspec.source.base import TokenSource
from asyncspec.source.expand import Coroutine, Grower, Proposal, WrappedGrower
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Expand, Expanded

LOOKED_AT = 32
"""Successors of which the allowed ones are taken, or more where a tree is wider."""

FEW = 16
"""So many tokens or fewer are proposed for being all that is allowed."""


class _Session:
    """Where a session's answer begins, and its grammar there."""

    def __init__(self, matcher: PathMatcher, prompt_length: int) -> None:
        self.matcher = matcher
        self.start = prompt_length


class ConstrainedSource(TokenSource):
    """``source``, and for sessions with a grammar its allowed proposals alone."""

    def __init__(self, source: TokenSource, grammars: Callable[[], Grammars]) -> None:
        self._source = source
        self._grammars = grammars
        self._sessions: dict[SessionId, _Session] = {}

    def draft(self, job: Expand) -> Coroutine[Any, Expanded]:
        if job.base == 0 and job.grammar:
            matcher = self._grammars().peers_matcher(job.grammar)
            self._sessions[job.session] = _Session(matcher, job.prompt_length)
        if job.session in self._sessions:
            return (yield from super().draft(job))
        return (yield from self._source.draft(job))

    def commit(self, job: Expand) -> Coroutine[Any, int]:
        length = yield from self._source.commit(job)
        if (session := self._sessions.get(job.session)) is not None:
            session.matcher.commit(job.committed[max(0, session.start - job.base) :])
        return length

    def grower(self, job: Expand) -> Grower:
        grower, session = self._source.grower(job), self._sessions.get(job.session)
        return grower if session is None else _AllowedGrower(grower, session.matcher)

    def compute(self, passes: Sequence[Any]) -> None:
        self._source.compute(passes)

    def feed(self, job: Feed) -> None:
        self._source.feed(job)

    def release(self, session: SessionId) -> None:
        self._sessions.pop(session, None)
        self._source.release(session)

    def abandon(self, job: FeatureJob) -> None:
        self._source.abandon(job)


class _AllowedGrower(WrappedGrower):
    """A ``Grower`` whose proposals a grammar allows."""

    def __init__(self, grower: Grower, matcher: PathMatcher) -> None:
        super().__init__(grower)
        self._matcher = matcher

    def propose(self, nodes: Sequence[int], width: int) -> list[Proposal]:
        proposals = self._grower.propose(nodes, max(width, LOOKED_AT))
        return [
            self._allowed(self._paths[node], proposal, width)
            for node, proposal in zip(nodes, proposals, strict=True)
        ]

    def _allowed(self, path: tuple[int, ...], proposal: Proposal, width: int) -> Proposal:
        allowed = self._matcher.allowed(path)
        if allowed is None:
            return (), ()
        return masked(proposal, allowed.tolist(), width)


def masked(proposal: Proposal, allowed: Sequence[int], width: int) -> Proposal:
    """The ``width`` best of a proposal that are allowed, and of few allowed tokens the others,
    with log-probabilities among what is allowed: what the proposal does not name has, all of it
    together, at most what is left of 1."""
    those = set(allowed)
    kept = [(log_prob, token) for token, log_prob in zip(*proposal, strict=True) if token in those]
    rest = max(1e-6, 1.0 - sum(map(math.exp, proposal[1])))
    others = those.difference(proposal[0]) if len(those) <= FEW else set()
    kept += [(math.log(rest / len(others)), token) for token in sorted(others)]
    covered = sum(math.exp(log_prob) for log_prob, _ in kept)
    total = covered if len(those) <= FEW else covered + rest
    kept.sort(key=lambda pair: (-pair[0], pair[1]))
    best = kept[:width]
    return (
        [token for _, token in best],
        [min(0.0, log_prob - math.log(total)) for log_prob, _ in best],
    )
