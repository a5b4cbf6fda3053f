"""An independent draft model as a token source: EAGLE-2's tree on any causal LM, whatever computes.

The draft's numbers decide how much is accepted, never what: it runs on whatever kernels are
fastest.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic

from asyncspec.backend.draft_trie import Trie, TrieGrower, Wanted
from asyncspec.backend.tree_stage import C
from asyncspec.core.jobs import FeatureJob, Row
from asyncspec.source.base import TokenSource
from asyncspec.source.batch import AbandonedJobs, Coroutine
from asyncspec_protocol.ids import NodeId, SessionId
from asyncspec_protocol.messages import Expand

CHUNK = 64
"""Rows of a prompt per pass."""

REMEMBER = 32
"""Successors remembered per node, unless more are asked for."""


@dataclass(frozen=True, slots=True)
class DraftPass(Generic[C]):
    """One session's part: rows whose places in its trie and cache are taken already."""

    cache: C
    committed: int
    rows: Sequence[Row]
    tokens: Sequence[int]
    # The last rows are these nodes, whose successors are wanted.
    nodes: Sequence[NodeId]


@dataclass(slots=True)
class _Session(Generic[C]):
    cache: C
    trie: Trie = field(default_factory=Trie)
    # Committed tokens, also those beyond the model's context.
    length: int = 0
    # The last of them.
    tip_token: int = 0
    # Successors remembered per node.
    remembered: int = REMEMBER


@dataclass(frozen=True, slots=True)
class ModelPass(DraftPass[C]):
    """See ``DraftPass``, of a session of a draft model."""

    session: _Session[C]


class CachedDraftModel(TokenSource, Generic[C]):
    """A whole small model with a tree cache per session. One thread only."""

    def __init__(self, context: int, vocab: int) -> None:
        # Tokens from here on are never proposed: the target does not have them.
        self.vocab = vocab
        # Rows that went through the model, over all sessions.
        self.rows_computed = 0
        self._context = context
        self._sessions: dict[SessionId, _Session[C]] = {}
        self._given_up = AbandonedJobs()

    @abstractmethod
    def new_cache(self) -> C:
        """Of a session."""

    @abstractmethod
    def compute(self, passes: Sequence[ModelPass[C]]) -> None:
        """See ``TokenSource``: what was wanted is in the sessions' tries after."""

    def release(self, session: SessionId) -> None:
        known = self._sessions.pop(session, None)
        if known is not None:
            known.cache.close()
        self._given_up.forget(session)

    def grower(self, job: Expand) -> TrieGrower[ModelPass[C]]:
        session = self._sessions[job.session]
        return TrieGrower(
            session.trie,
            self._context - session.length,
            self.vocab,
            lambda wanted: _tree_pass(session, wanted),
            lambda: self._given_up.has(job),
        )

    def abandon(self, job: FeatureJob) -> None:
        self._given_up.note(job)

    def check(self) -> None:
        """Raise ``AssertionError`` where a session's bookkeeping contradicts itself (tests)."""
        for session in self._sessions.values():
            session.trie.check()
            session.cache.check(session.trie.length)

    def commit(self, job: Expand) -> Coroutine[ModelPass[C], int]:
        """See ``TokenSource``. The tip's successors are known after."""
        known = self._sessions.get(job.session)
        length = 0 if known is None else known.length
        if length != job.base:
            raise ValueError(f"the draft model knows {length} tokens, not {job.base}")
        session = known or _Session(self.new_cache(), remembered=max(job.width, REMEMBER))
        self._sessions[job.session] = session
        session.length += len(job.committed)
        if session.length > self._context:
            # Nothing sensible comes from here on; the text goes on without a draft.
            session.cache.close()
            session.cache, session.trie = self.new_cache(), Trie()
            return session.length
        yield from _commit(session, job.committed)
        session.tip_token = job.committed[-1] if job.committed else session.tip_token
        if job.width > session.remembered:
            yield from _remember_more(session, job.width)
        return session.length


def _commit(session: _Session[C], tokens: Sequence[int]) -> Iterator[ModelPass[C]]:
    """Bring a session's committed path up to date."""
    trie = session.trie
    start = trie.length
    done, stay = trie.advance(tokens)
    if stay is not None:
        session.cache.compact(start, stay)
    fresh = tokens[done:]
    for i in range(0, len(fresh), CHUNK):
        chunk = fresh[i : i + CHUNK]
        committed = trie.length
        rows = trie.append(chunk)
        last = i + CHUNK >= len(fresh)
        yield _part(session, committed, rows, chunk, [trie.tip] if last else [])


def _remember_more(session: _Session[C], width: int) -> Iterator[ModelPass[C]]:
    """Start the tree again with longer memories: the tip's row is run once more."""
    session.remembered = width
    trie = session.trie
    trie.forget_tree()
    if trie.length:
        slot = trie.length - 1
        row = Row(slot=slot, position=slot, visible=(slot,))
        yield _part(session, slot, (row,), [session.tip_token], [trie.tip])


def _part(
    session: _Session[C],
    committed: int,
    rows: Sequence[Row],
    tokens: Sequence[int],
    nodes: Sequence[NodeId],
) -> ModelPass[C]:
    return ModelPass(session.cache, committed, rows, tokens, nodes, session)


def _tree_pass(session: _Session[C], wanted: Wanted) -> ModelPass[C]:
    committed = session.trie.length
    ids, rows = session.trie.add_child(wanted)
    return _part(session, committed, rows, [token for _, token in wanted], ids)
