"""Devices of simulated nodes: a stage that knows texts by the hashes of their paths, and a draft.

Every stage checks for itself, in O(1) a row, that a row sees its own ancestors: a wrong slot, mask
or order makes a wrong hash, and so a wrong token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from asyncspec.jobs import Admit, Compact, Forward, Release, Row, SourceJob, StageJob
from asyncspec.rng import mix
from asyncspec.sim.language import EMPTY, Language, follow
from asyncspec.source.grow import TIP, Grower, Proposal, answer
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Expand, Expanded

_MASK = (1 << 64) - 1

Hidden = tuple[int, int]
"""What a row carries from stage to stage: its parent's path and its own."""


class PathStage:
    """A stage of a simulated target; its cache holds the path that each slot's node ends.

    Knows nothing of layers: the first stage hashes, all check, the last one draws.
    """

    def __init__(self, language: Language, *, last: bool) -> None:
        self._language = language
        self._last = last
        self._caches: dict[SessionId, list[int]] = {}

    def run(self, job: StageJob) -> object | None:
        """See ``StageBackend``."""
        match job:
            case Admit(session):
                self._caches[session] = []
            case Release(session):
                self._caches.pop(session, None)
            case Compact(session, start, keep):
                cache = self._caches[session]
                cache[start:] = [cache[slot] for slot in keep]
            case Forward():
                return self._forward(job, self._caches[job.session])
        return None

    def _forward(self, job: Forward, cache: list[int]) -> object:
        hidden: list[Hidden] = []
        committed, above = job.committed, self._above(job)
        cache.extend([EMPTY] * (max([row.slot for row in job.rows]) + 1 - len(cache)))
        for i, row in enumerate(job.rows):
            seen = _seen(row, committed, cache)
            if above is None:
                own = seen, follow(seen, job.tokens[i])
            else:
                own = above[i]
                if own[0] != seen:
                    own = own[0], mix((own[1] + seen) & _MASK)
            cache[row.slot] = own[1]
            hidden.append(own)
        if not self._last:
            return tuple(hidden)
        return tuple([self._language.truth(hidden[i][1]) for i in job.judge])

    def _above(self, job: Forward) -> Sequence[Hidden] | None:
        """What the rows bring from the stage before; None at the first."""
        if job.hidden is None:
            return None
        handle = cast("Sequence[Hidden]", job.hidden.handle)
        return [handle[row] for row in job.hidden.rows]

    def abandon(self, job: StageJob) -> None:
        """See ``StageBackend``. A pass is over before it could be stopped."""

    def slots_held(self) -> dict[SessionId, int]:
        """Number of slots in use, by session."""
        return {session: len(cache) for session, cache in self._caches.items()}


def _seen(row: Row, committed: int, cache: list[int]) -> int:
    """The path of the parent, as this row's slots tell it."""
    visible = row.visible
    if row.position != committed + len(visible) - 1 or visible[-1] != row.slot:
        return mix(row.slot)  # it sees too much or too little
    if len(visible) > 1:
        return cache[visible[-2]]
    return cache[committed - 1] if committed else EMPTY


class LanguageSource:
    """A simulated draft as a ``TokenSource``."""

    def __init__(self, language: Language) -> None:
        self._language = language
        # Committed tokens and their path.
        self._sessions: dict[SessionId, tuple[int, int]] = {}

    def run(self, job: SourceJob) -> Expanded | None:
        """See ``TokenSource``."""
        if isinstance(job, Release):
            self._sessions.pop(job.session, None)
            return None
        length = self.begin(job)
        return answer(self.grower(job), job, length)

    def begin(self, job: Expand) -> int:
        """See ``Part``."""
        length, path = self._sessions.get(job.session, (0, EMPTY))
        if length != job.base:
            raise ValueError(f"the source knows {length} tokens, not {job.base}")
        for token in job.committed:
            path = follow(path, token)
        length += len(job.committed)
        self._sessions[job.session] = (length, path)
        return length

    def grower(self, job: Expand) -> Grower:
        """See ``Part``."""
        return _LanguageGrower(self._language, *self._sessions[job.session])

    def abandon(self, job: SourceJob) -> None:
        """See ``TokenSource``. A tree is grown before it could be stopped."""


class _LanguageGrower:
    """See ``Grower``: a candidate is its parent's path, its token, and its depth below the tip.
    Its own path is only made where the tree goes on from it."""

    def __init__(self, language: Language, length: int, tip: int) -> None:
        self._language = language
        self._length = length
        self._paths = {TIP: tip}
        self._candidates: list[tuple[int, int, int]] = []

    def hang(self, parent: int, token: int) -> None:
        depth = 0 if parent == TIP else self._candidates[parent][2]
        self._candidates.append((parent, token, depth + 1))

    def propose(self, nodes: Sequence[int], width: int) -> list[Proposal]:
        return [self._propose(node, width) for node in nodes]

    def _propose(self, node: int, width: int) -> Proposal:
        depth = 0 if node == TIP else self._candidates[node][2]
        return self._language.propose(self._path(node), self._length + depth, depth, width)

    def _path(self, node: int) -> int:
        path = self._paths.get(node)
        if path is None:
            parent, token, _ = self._candidates[node]
            path = self._paths[node] = follow(self._path(parent), token)
        return path
