"""Devices of simulated nodes: a stage that knows texts by the hashes of their paths, and a draft.

Every stage checks for itself, in O(1) a row, that a row sees its own ancestors: a wrong slot, mask
or order makes a wrong hash, and so a wrong token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from asyncspec.core import jobs
from asyncspec.core.jobs import Forward, Row, SamplerOutput, StageJob, TensorRows
from asyncspec.core.rng import MASK, mix
from asyncspec.sim.language import EMPTY, Language, follow, likely
from asyncspec.source.base import StateSource
from asyncspec.source.expand import Grower, Proposal, StateGrower
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Expand

Hidden = tuple[int, int]
"""What a row carries from stage to stage: its parent's path and its own."""


class PathStage:
    """A stage of a simulated target, without layers: the first one hashes, all check, the last one
    draws. Its cache holds the path that each slot's node ends."""

    def __init__(self, language: Language, *, last: bool) -> None:
        self._language = language
        self._last = last
        # Its cache, and how many likeliest tokens come with every sampled one.
        self._sessions: dict[SessionId, tuple[list[int], int]] = {}

    def run(self, job: StageJob) -> object | None:
        match job:
            case Forward():
                return self._forward(job)
            case jobs.Batch(passes):
                return tuple([self._forward(one) for one in passes])
            case jobs.Compact(session, start, keep):
                cache, _ = self._sessions[session]
                cache[start:] = [cache[slot] for slot in keep]
            case jobs.Admit(session, parent_session=parent, common_prefix=shared):
                cache = self._sessions[parent][0][:shared] if shared else []
                self._sessions[session] = cache, job.top_logprobs
            case jobs.Trim(session, slots):
                del self._sessions[session][0][slots:]
            case jobs.Release(session):
                self._sessions.pop(session, None)
            case jobs.Export() | jobs.Import():
                return ()  # simulated nodes have no disks
        return None

    def _forward(self, job: Forward) -> object:
        cache, top_logprobs = self._sessions[job.session]
        cache.extend([EMPTY] * (max([row.slot for row in job.rows]) + 1 - len(cache)))
        hidden = self._read(job, cache) if job.hidden is None else _check(job, job.hidden, cache)
        if not self._last:
            return hidden
        tokens = tuple([self._language.truth(hidden[i][1]) for i in job.sampled_rows])
        if not top_logprobs:
            return tokens
        sampled = [(hidden[i][1], job.rows[i].position + 1) for i in job.sampled_rows]
        best = [likely(self._language, path, length, top_logprobs) for path, length in sampled]
        return SamplerOutput(tokens, top_tokens=tuple((tuple(t), tuple(p)) for t, p in best))

    def _read(self, job: Forward, cache: list[int]) -> Sequence[Hidden]:
        """The first stage: rows are tokens."""
        hidden: list[Hidden] = []
        for row, token in zip(job.rows, job.tokens, strict=True):
            seen = _seen(row, job.committed, cache)
            path = cache[row.slot] = follow(seen, token)
            hidden.append((seen, path))
        return tuple(hidden)


def _check(job: Forward, received: TensorRows, cache: list[int]) -> Sequence[Hidden]:
    """A later stage: rows bring their paths; one of other slots has its own from here on."""
    handle = cast("Sequence[Hidden]", received.handle)
    hidden: list[Hidden] = []
    for row, number in zip(job.rows, received.rows, strict=True):
        parent, path = handle[number]
        seen = _seen(row, job.committed, cache)
        cache[row.slot] = path if seen == parent else mix((path + seen) & MASK)
        hidden.append((parent, cache[row.slot]))
    return hidden


def _seen(row: Row, committed: int, cache: list[int]) -> int:
    """The path of the parent, by the slots that the row attends to."""
    visible = row.visible
    above = len(visible) - 1
    if row.position != committed + above or visible[above] != row.slot:
        return mix(row.slot)  # it sees too much or too little
    if above:
        return cache[visible[above - 1]]
    return cache[committed - 1] if committed else EMPTY


class LanguageSource(StateSource[int]):
    """A simulated draft: a session's state is the path of its text."""

    def __init__(self, language: Language) -> None:
        super().__init__(lambda _: EMPTY, follow)
        self._language = language

    def grower(self, job: Expand) -> Grower:
        length, tip = self._sessions[job.session]

        def extend(place: tuple[int, int], token: int) -> tuple[int, int]:
            path, depth = place
            return follow(path, token), depth + 1

        def propose(place: tuple[int, int], width: int) -> Proposal:
            path, depth = place
            return self._language.propose(path, length + depth, depth, width)

        return StateGrower((tip, 0), extend, propose)
