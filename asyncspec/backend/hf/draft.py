"""An independent draft model as a token source: EAGLE-2's tree on any causal LM.

The draft's numbers decide how much is accepted, never what: it runs on whatever kernels are
fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from asyncspec.backend.hf.attention import FastAttention
from asyncspec.backend.hf.cache import TreeCache
from asyncspec.backend.hf.checkpoint import Checkpoint, resolve_dtype
from asyncspec.backend.hf.proposals import best_successors
from asyncspec.backend.hf.recipe import Recipe
from asyncspec.backend.hf.shard import Shard, load_shard
from asyncspec.backend.hf.trie import Trie, TrieGrower, Wanted
from asyncspec.jobs import Release, Row, SourceJob
from asyncspec.source.grow import Proposal, answer
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Expand, Expanded

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


class HFDraft:
    """A whole small model with a tree cache per session. One thread only."""

    def __init__(self, shard: Shard, vocab: int | None = None) -> None:
        self.shard = shard
        # Tokens from here on are never proposed: the target does not have them.
        self.vocab = min(shard.facts.vocab_size, vocab or shard.facts.vocab_size)
        # Rows that went through the model, over all sessions.
        self.rows_computed = 0
        self._context = shard.facts.context_length
        self._shape = shard.cache_shape("fast")
        self._sessions: dict[SessionId, _Session] = {}
        self._useless: SourceJob | None = None

    def run(self, job: SourceJob) -> Expanded | None:
        """See ``TokenSource``. Raises ``ValueError`` where ``base`` is not what the source
        knows."""
        if isinstance(job, Release):
            self._sessions.pop(job.session, None)
            return None
        length = self.begin(job)
        return answer(self.grower(job), job, length)

    def begin(self, job: Expand) -> int:
        """See ``Part``."""
        with torch.inference_mode():
            return self._advance(job).length

    def abandon(self, job: SourceJob) -> None:
        """See ``TokenSource``."""
        self._useless = job

    def check(self) -> None:
        """Raise ``AssertionError`` where a session's bookkeeping contradicts itself (tests)."""
        for session in self._sessions.values():
            session.trie.check()
            session.cache.check(session.trie.length)

    def _advance(self, job: Expand) -> _Session:
        """Bring a session's committed path up to date; its tip's successors are known after."""
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
            return session
        self._commit(session, job.committed)
        session.tip_token = job.committed[-1] if job.committed else session.tip_token
        if job.width > session.remembered:
            self._remember_more(session, job.width)
        return session

    def _commit(self, session: _Session, tokens: Sequence[int]) -> None:
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
            if i + CHUNK < len(fresh):
                self._pass(session, committed, rows, chunk, [])
            else:
                (proposal,) = self._pass(session, committed, rows, chunk, [len(chunk) - 1])
                trie.learn(trie.tip, proposal)

    def _remember_more(self, session: _Session, width: int) -> None:
        """Start the tree again with longer memories: the tip's row is run once more."""
        session.remembered = width
        trie = session.trie
        trie.forget_tree()
        if trie.length:
            slot = trie.length - 1
            row = Row(slot=slot, position=slot, visible=(slot,))
            (proposal,) = self._pass(session, slot, (row,), [session.tip_token], [0])
            trie.learn(trie.tip, proposal)

    def grower(self, job: Expand) -> TrieGrower:
        """See ``Part``."""
        session = self._sessions[job.session]

        def compute(wanted: Wanted) -> None:
            committed = session.trie.length
            ids, rows = session.trie.hang(wanted)
            tokens = [token for _, token in wanted]
            every = range(len(rows))
            with torch.inference_mode():
                proposals = self._pass(session, committed, rows, tokens, every)
            for node, proposal in zip(ids, proposals, strict=True):
                session.trie.learn(node, proposal)

        room = self._context - session.length
        return TrieGrower(session.trie, room, self.vocab, compute, lambda: self._useless is job)

    def _pass(
        self,
        session: _Session,
        committed: int,
        rows: Sequence[Row],
        tokens: Sequence[int],
        judge: Sequence[int],
    ) -> list[Proposal]:
        """Compute nodes; the best successors of those in ``judge``, with log-probabilities."""
        self.rows_computed += len(rows)
        tree = FastAttention(session.cache, committed, rows)
        positions = torch.tensor([row.position for row in rows])
        # Two models may share a tokenizer and still pad their vocabularies to different sizes.
        known = self.shard.facts.vocab_size
        inputs = torch.tensor([token if token < known else 0 for token in tokens])
        if not judge:
            self.shard.hidden(inputs, positions, tree)
            return []
        logits = self.shard.logits(inputs, positions, tree, torch.tensor(judge))
        return best_successors(logits[:, : self.vocab], session.remembered)


def load_draft(checkpoint: Checkpoint, *, dtype: str = "auto", vocab: int | None = None) -> HFDraft:
    """Read a whole checkpoint as a draft model. ``vocab``: size of the target's vocabulary.

    Raises ``UserError`` or ``CheckpointError``."""
    layers = checkpoint.facts.layers
    with torch.inference_mode():
        shard = load_shard(
            checkpoint,
            0,
            layers,
            resolve_dtype(checkpoint, dtype),
            "fast",
            Recipe(min_rows=1),
            # A draft is to be quick: a tied head gets a packed copy.
            share_tied=False,
        )
    return HFDraft(shard, vocab)
