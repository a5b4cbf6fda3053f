"""Devices of simulated nodes: a stage that knows texts by the hashes of their paths, and a draft.

Every stage checks for itself, in O(1) a row, that a row sees its own ancestors: a wrong slot, mask
or order makes a wrong hash, and so a wrong token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from asyncspec.core.jobs import (
    Admit,
    Batch,
    Compact,
    Forward,
    Release,
    Row,
    SamplerOutput,
    StageJob,
    TensorRows,
    Trim,
)
from asyncspec.core.rng import MASK, mix
from asyncspec.sim.language import EMPTY, Language, follow, likely
from asyncspec.source.base import StateSource
from asyncspec.source.expand import Grower, Proposal, StateGrower
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Expand

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
        # Likeliest tokens wanted with every verdict, where some are.
        self._tops: dict[SessionId, int] = {}

    def run(self, job: StageJob) -> object | None:
        match job:
            case Forward():
                return self._forward(job, self._caches[job.session])
            case Batch(passes):
                return tuple([self._forward(one, self._caches[one.session]) for one in passes])
            case Compact(session, start, keep):
                cache = self._caches[session]
                cache[start:] = [cache[slot] for slot in keep]
            case Admit(session, parent_session=like, common_prefix=shared):
                self._caches[session] = self._caches[like][:shared] if shared else []
                if job.top_logprobs:
                    self._tops[session] = job.top_logprobs
            case Trim(session, slots):
                del self._caches[session][slots:]
            case Release(session):
                self._caches.pop(session, None)
                self._tops.pop(session, None)
        return None

    def _forward(self, job: Forward, cache: list[int]) -> object:
        cache.extend([EMPTY] * (max([row.slot for row in job.rows]) + 1 - len(cache)))
        hidden = self._read(job, cache) if job.hidden is None else _check(job, job.hidden, cache)
        if not self._last:
            return hidden
        tokens = tuple([self._language.truth(hidden[i][1]) for i in job.sampled_rows])
        tops = self._tops.get(job.session)
        if tops is None:
            return tokens
        verified = [(hidden[i][1], job.rows[i].position + 1) for i in job.sampled_rows]
        best = [likely(self._language, path, length, tops) for path, length in verified]
        return SamplerOutput(tokens, top_tokens=tuple((tuple(t), tuple(p)) for t, p in best))

    def _read(self, job: Forward, cache: list[int]) -> Sequence[Hidden]:
        """The first stage: rows are tokens."""
        hidden: list[Hidden] = []
        for row, token in zip(job.rows, job.tokens, strict=True):
            seen = _seen(row, job.committed, cache)
            own = cache[row.slot] = follow(seen, token)
            hidden.append((seen, own))
        return tuple(hidden)

    def slots_held(self) -> dict[SessionId, int]:
        """Number of slots in use, by session."""
        return {session: len(cache) for session, cache in self._caches.items()}


def _check(job: Forward, came: TensorRows, cache: list[int]) -> Sequence[Hidden]:
    """A later stage: rows have their paths with them, and see whether their slots agree. A row for
    which they do not has a path of its own from here on."""
    hidden = cast("Sequence[Hidden]", came.handle)
    if len(came.rows) < len(hidden):
        hidden = [hidden[row] for row in came.rows]
    committed, wrong = job.committed, dict[int, Hidden]()
    for i, (row, (parent, own)) in enumerate(zip(job.rows, hidden, strict=True)):
        visible, slot = row.visible, row.slot
        above = len(visible) - 1
        # As in ``_seen``, but for rows at the tip and mistakes: a call a row would cost as much.
        if above and visible[above] == slot and row.position == committed + above:
            seen = cache[visible[above - 1]]
        else:
            seen = _seen(row, committed, cache)
        if seen == parent:
            cache[slot] = own
        else:
            cache[slot] = mix((own + seen) & MASK)
            wrong[i] = parent, cache[slot]
    return [wrong.get(i, pair) for i, pair in enumerate(hidden)] if wrong else hidden


def _seen(row: Row, committed: int, cache: list[int]) -> int:
    """The path of the parent, as this row's slots tell it."""
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
        super().__init__()
        self._language = language

    def start(self) -> int:
        return EMPTY

    def extend(self, state: int, token: int) -> int:
        return follow(state, token)

    def grower(self, job: Expand) -> Grower:
        length, tip = self._sessions[job.session]

        def extend(place: tuple[int, int], token: int) -> tuple[int, int]:
            path, depth = place
            return follow(path, token), depth + 1

        def propose(place: tuple[int, int], width: int) -> Proposal:
            path, depth = place
            return self._language.propose(path, length + depth, depth, width)

        return StateGrower((tip, 0), extend, propose)
