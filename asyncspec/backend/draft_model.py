"""Models as token sources: EAGLE-2's tree on any causal LM or EAGLE head, whatever computes.

A draft's numbers decide how much is accepted, never what: it runs on whatever kernels are fastest.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from asyncspec.backend.draft_trie import Trie, TrieGrower, Wanted
from asyncspec.backend.reference import CHUNK
from asyncspec.backend.tree_stage import C
from asyncspec.core.jobs import FeatureJob, Row, draft_jobs
from asyncspec.source.base import TokenSource
from asyncspec.source.calibrated import CalibratedGrower, FirstChoices
from asyncspec.source.expand import Coroutine, Grower, Proposal
from asyncspec_protocol.ids import NodeId, SessionId
from asyncspec_protocol.messages import Expand

UNLIKELY = -1e6
"""The logit of a token that is not drafted; not infinite, as it may become a score."""

REMEMBER = 32
"""Successors remembered per node, unless more are requested."""


@dataclass(slots=True, kw_only=True)
class SourceSession:
    """A session of a model that proposes."""

    # Committed tokens, also those beyond the model's context.
    length: int = 0
    # The last of them.
    tip_token: int = 0
    first_choices: FirstChoices = field(default_factory=FirstChoices)


@dataclass(slots=True)
class CachedSession(SourceSession, Generic[C]):
    """The cache of a session, and what its slots hold."""

    cache: C
    trie: Trie = field(default_factory=Trie)
    # Successors remembered per node.
    remembered: int = REMEMBER


A = TypeVar("A", bound=SourceSession)
S = TypeVar("S", bound=CachedSession[Any])


@dataclass(frozen=True, slots=True)
class DraftPass(Generic[S]):
    """One session's part of a pass: rows that have their places in its trie and cache."""

    session: S
    committed: int
    rows: Sequence[Row]
    tokens: Sequence[int]
    # The last rows are these nodes, whose successors are wanted.
    nodes: Sequence[NodeId]
    # An EAGLE head's tensor [n, H]: true features as its layer takes them, or predicted ones.
    features: Any = None


def prompt_passes(session: S, tokens: Sequence[int]) -> Iterator[DraftPass[S]]:
    """Commit tokens that are not computed yet; the last pass computes the tip's successors."""
    trie = session.trie
    for i in range(0, len(tokens), CHUNK):
        chunk, committed = tokens[i : i + CHUNK], trie.length
        rows = trie.append(chunk)
        nodes = [trie.tip] if i + CHUNK >= len(tokens) else []
        yield DraftPass(session, committed, rows, chunk, nodes)


def learn(passes: Sequence[DraftPass[S]], proposals: Iterable[Proposal]) -> None:
    """Remember the successors of all nodes of ``passes``, in their order."""
    nodes = ((one.session.trie, node) for one in passes for node in one.nodes)
    for (trie, node), proposal in zip(nodes, proposals, strict=True):
        trie.learn(node, proposal)


class ModelSource(TokenSource, Generic[A]):
    """A model that proposes, with a state per session. One thread only."""

    def __init__(self, context: int) -> None:
        """``context``: longest sequence in tokens."""
        self._context = context
        self._sessions: dict[SessionId, A] = {}

    @abstractmethod
    def open_session(self) -> A:
        """Without a token."""

    @abstractmethod
    def advance(self, session: A, job: Expand) -> Iterator[Any]:
        """Commit the job's tokens: passes. The tip's successors are known after, or computed with
        the tree."""

    def known(self, session: SessionId) -> int:
        """Committed tokens the source knows of a session."""
        entry = self._sessions.get(session)
        return 0 if entry is None else entry.length

    def commit(self, job: Expand) -> Coroutine[Any, int]:
        if (length := self.known(job.session)) != job.base:
            raise ValueError(f"the source knows {length} tokens, not {job.base}")
        if job.session not in self._sessions:
            self._sessions[job.session] = self.open_session()
        session = self._sessions[job.session]
        yield from self.advance(session, job)
        session.length += len(job.committed)
        session.first_choices = session.first_choices.advance(job.committed)
        return session.length

    def tree_grower(self, job: Expand) -> Grower:
        grower = self.grower(job)
        return CalibratedGrower(grower, self._sessions[job.session]) if job.calibrated else grower

    def release(self, session: SessionId) -> None:
        self._sessions.pop(session, None)


class CachedSource(ModelSource[S]):
    """A model with a tree cache per session."""

    def __init__(self, context: int, vocab: int) -> None:
        """``vocab``: most successors of a node."""
        super().__init__(context)
        self.vocab = vocab
        # The last abandoned tree of each session. Written by one thread while another reads: every
        # step is a single operation on the dictionary.
        self._abandoned: dict[SessionId, Expand] = {}

    @abstractmethod
    def compute(self, passes: Sequence[DraftPass[S]]) -> None:
        """See ``TokenSource``: the successors are in the sessions' tries after (``learn``)."""

    def grower(self, job: Expand) -> Grower:
        session = self._sessions[job.session]
        return TrieGrower(
            session.trie,
            self._context - session.length,
            self.vocab,
            lambda wanted: self.tree_pass(session, wanted),
            lambda: self._abandoned.get(job.session) is job,
        )

    def tree_pass(self, session: S, wanted: Wanted) -> DraftPass[S]:
        """Add nodes to the tree; the pass that computes them."""
        committed = session.trie.length
        ids, rows = session.trie.add_child(wanted)
        return DraftPass(session, committed, rows, [token for _, token in wanted], ids)

    def release(self, session: SessionId) -> None:
        if session in self._sessions:
            self._sessions[session].cache.close()
        super().release(session)
        self._abandoned.pop(session, None)

    def abandon(self, job: FeatureJob) -> None:
        for tree in draft_jobs(job):
            self._abandoned[tree.session] = tree

    def check(self) -> None:
        """Raise ``AssertionError`` where a session's bookkeeping contradicts itself (tests)."""
        for session in self._sessions.values():
            session.trie.check()
            session.cache.check(session.trie.length)


class CachedDraftModel(CachedSource[CachedSession[C]], Generic[C]):
    """A whole small model."""

    @abstractmethod
    def new_cache(self) -> C:
        """Make an empty cache for a session."""

    def open_session(self) -> CachedSession[C]:
        return CachedSession(self.new_cache())

    def advance(
        self, session: CachedSession[C], job: Expand
    ) -> Iterator[DraftPass[CachedSession[C]]]:
        if session.length + len(job.committed) > self._context:
            # Nothing sensible comes from here on; the text continues without a draft.
            session.cache.close()
            session.cache, session.trie = self.new_cache(), Trie()
            return
        trie, start = session.trie, session.trie.length
        done, stay = trie.advance(job.committed)
        if stay is not None:
            session.cache.compact(start, stay)
        session.tip_token = job.committed[-1] if job.committed else session.tip_token
        wider = job.width > session.remembered
        session.remembered = max(job.width, session.remembered)
        fresh = job.committed[done:]
        yield from prompt_passes(session, fresh)
        if wider and not fresh and trie.length:
            # Start the tree again with more successors: the tip's row is run once more.
            trie.forget_tree()
            slot = trie.length - 1
            rows = trie.committed_rows(slot)
            yield DraftPass(session, slot, rows, [session.tip_token], [trie.tip])
