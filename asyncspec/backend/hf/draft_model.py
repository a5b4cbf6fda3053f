"""What sessions need of one draft pass, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from asyncspec.backend.draft_trie import Trie, TrieGrower, Wanted
from asyncspec.backend.hf.attention import BatchedAttention, FastAttention, TreeMask, row_slices
from asyncspec.backend.hf.cache import TreeCache
from asyncspec.backend.hf.checkpoint import Checkpoint, resolve_dtype
from asyncspec.backend.hf.kernels.cpu.capabilities import FAST
from asyncspec.backend.hf.kernels.cpu.dense import tune_min_rows
from asyncspec.backend.hf.sampling import best_successors
from asyncspec.backend.hf.shard import Shard, load_shard
from asyncspec.core.jobs import FeatureJob, Row
from asyncspec.source.base import TokenSource
from asyncspec.source.batch import AbandonedJobs, Coroutine
from asyncspec_protocol.ids import NodeId, SessionId
from asyncspec_protocol.messages import Expand


@dataclass(frozen=True, slots=True)
class DraftPass:
    """One session's part: rows whose places in its trie and cache are taken already."""

    cache: TreeCache
    committed: int
    rows: Sequence[Row]
    tokens: Sequence[int]
    # The last rows are these nodes, whose successors are wanted.
    nodes: Sequence[NodeId]


class BatchedDraftPass:
    """The rows of all ``parts``, one part after the other."""

    def __init__(self, parts: Sequence[DraftPass]) -> None:
        trees = [FastAttention(part.cache, part.committed, part.rows) for part in parts]
        self.count = sum(len(part.rows) for part in parts)
        self.tree: TreeMask = trees[0] if len(trees) == 1 else BatchedAttention(trees)
        self.positions = torch.tensor([row.position for part in parts for row in part.rows])
        # The rows whose successors are wanted.
        self.wanted: list[int] = []
        for part, own in zip(parts, row_slices(trees), strict=True):
            self.wanted += range(own.stop - len(part.nodes), own.stop)


# --- An independent draft model as a token source: EAGLE-2's tree on any causal LM.
# The draft's numbers decide how much is accepted, never what: it runs on whatever kernels are
# fastest.

CHUNK = 64
"""Rows of a prompt per pass."""

REMEMBER = 32
"""Successors remembered per node, unless more are asked for."""


@dataclass(slots=True)
class _Session:
    cache: TreeCache
    trie: Trie = field(default_factory=Trie)
    # Committed tokens, also those beyond the model's context.
    length: int = 0
    # The last of them.
    tip_token: int = 0
    # Successors remembered per node.
    remembered: int = REMEMBER


@dataclass(frozen=True, slots=True)
class ModelPass(DraftPass):
    """See ``DraftPass``, of a session of a draft model."""

    session: _Session


class DraftModel(TokenSource):
    """A whole small model with a tree cache per session. One thread only."""

    def __init__(self, shard: Shard, vocab: int | None = None) -> None:
        self.shard = shard
        # Tokens from here on are never proposed: the target does not have them.
        self.vocab = min(shard.info.vocab_size, vocab or shard.info.vocab_size)
        # Rows that went through the model, over all sessions.
        self.rows_computed = 0
        self._context = shard.info.context_length
        self._shape = shard.cache_shape("fast")
        self._sessions: dict[SessionId, _Session] = {}
        self._given_up = AbandonedJobs()

    @property
    def token_bytes(self) -> int:
        """Bytes held for each token of a session, and for each node of its tree."""
        return self._shape.max_slot_bytes()

    def release(self, session: SessionId) -> None:
        self._sessions.pop(session, None)
        self._given_up.forget(session)

    def grower(self, job: Expand) -> TrieGrower[ModelPass]:
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

    def commit(self, job: Expand) -> Coroutine[ModelPass, int]:
        """See ``TokenSource``. The tip's successors are known after."""
        known = self._sessions.get(job.session)
        length = 0 if known is None else known.length
        if length != job.base:
            raise ValueError(f"the draft model knows {length} tokens, not {job.base}")
        session = known or _Session(
            TreeCache(self._shape, self._context), remembered=max(job.width, REMEMBER)
        )
        self._sessions[job.session] = session
        session.length += len(job.committed)
        if session.length > self._context:
            # Nothing sensible comes from here on; the text goes on without a draft.
            session.cache, session.trie = TreeCache(self._shape, 0), Trie()
            return session.length
        yield from _commit(session, job.committed)
        session.tip_token = job.committed[-1] if job.committed else session.tip_token
        if job.width > session.remembered:
            yield from _remember_more(session, job.width)
        return session.length

    def compute(self, passes: Sequence[ModelPass]) -> None:
        """See ``TokenSource``: what was wanted is in the sessions' tries after."""
        # Two models may share a tokenizer and still pad their vocabularies to different sizes.
        known = self.shard.info.vocab_size
        tokens = [token if token < known else 0 for one in passes for token in one.tokens]
        with torch.inference_mode():
            shared = BatchedDraftPass(passes)
            self.rows_computed += shared.count
            where = (torch.tensor(tokens), shared.positions, shared.tree)
            if not shared.wanted:
                self.shard.hidden(*where)
                return
            logits = self.shard.logits(*where, torch.tensor(shared.wanted))
            most = max(one.session.remembered for one in passes)
            proposals = iter(best_successors(logits[:, : self.vocab], most))
        for one in passes:
            for node in one.nodes:
                one.session.trie.learn(node, next(proposals))


def _commit(session: _Session, tokens: Sequence[int]) -> Iterator[ModelPass]:
    """Bring a session's committed path up to date."""
    trie = session.trie
    start = trie.length
    done, stay = trie.advance(tokens)
    if stay is not None:
        with torch.inference_mode():
            session.cache.compact(start, stay)
    fresh = tokens[done:]
    for i in range(0, len(fresh), CHUNK):
        chunk = fresh[i : i + CHUNK]
        committed = trie.length
        rows = trie.append(chunk)
        last = i + CHUNK >= len(fresh)
        yield _part(session, committed, rows, chunk, [trie.tip] if last else [])


def _remember_more(session: _Session, width: int) -> Iterator[ModelPass]:
    """Start the tree again with longer memories: the tip's row is run once more."""
    session.remembered = width
    trie = session.trie
    trie.forget_tree()
    if trie.length:
        slot = trie.length - 1
        row = Row(slot=slot, position=slot, visible=(slot,))
        yield _part(session, slot, (row,), [session.tip_token], [trie.tip])


def _part(
    session: _Session,
    committed: int,
    rows: Sequence[Row],
    tokens: Sequence[int],
    nodes: Sequence[NodeId],
) -> ModelPass:
    return ModelPass(session.cache, committed, rows, tokens, nodes, session)


def _tree_pass(session: _Session, wanted: Wanted) -> ModelPass:
    committed = session.trie.length
    ids, rows = session.trie.add_child(wanted)
    return _part(session, committed, rows, [token for _, token in wanted], ids)


def load_draft(
    checkpoint: Checkpoint, *, dtype: str = "auto", vocab: int | None = None
) -> DraftModel:
    """Read a whole checkpoint as a draft model. ``vocab``: size of the target's vocabulary.

    Raises ``UserError`` or ``CheckpointError``."""
    layers = checkpoint.info.layers
    with torch.inference_mode():
        shard = load_shard(
            checkpoint,
            0,
            layers,
            resolve_dtype(checkpoint, dtype),
            "fast",
            FAST,
            # A draft is to be quick: a tied head gets a packed copy.
            share_tied=False,
        )
        tune_min_rows(shard.linears)
    return DraftModel(shard, vocab)
