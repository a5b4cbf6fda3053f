"""An EAGLE head as a token source: EAGLE-2's tree (its section 4) from the target's own features.

The committed rows of a session's cache are made of true features and never computed again. Rows
of the tree are made of guesses; they serve until the next true features come, and are then
dropped: what they guessed is known now, and everything below them was built on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from asyncspec.backend.base import WireTensor
from asyncspec.backend.draft_model import CHUNK, REMEMBER, DraftPass
from asyncspec.backend.draft_trie import Trie, TrieGrower, Wanted
from asyncspec.backend.hf.cache import TreeCache
from asyncspec.backend.hf.checkpoint import Checkpoint
from asyncspec.backend.hf.draft_model import BatchedDraftPass
from asyncspec.backend.hf.eagle.checkpoint import open_eagle
from asyncspec.backend.hf.eagle.geometry import Features
from asyncspec.backend.hf.eagle.head import EagleHead, load_head, token_bytes
from asyncspec.backend.hf.wire import from_wire, select, to_wire
from asyncspec.core.jobs import FeatureJob, Feed, TensorRows
from asyncspec.source.base import TokenSource
from asyncspec.source.batch import AbandonedJobs, Coroutine
from asyncspec_protocol.ids import NodeId, SessionId
from asyncspec_protocol.messages import Expand


@dataclass(slots=True)
class _Session:
    cache: TreeCache
    # One row per committed token but the first, which no feature precedes: a row is the node of
    # its token.
    trie: Trie = field(default_factory=Trie)
    # [H] each: of the last committed row and of all rows of the tree.
    guesses: dict[NodeId, torch.Tensor] = field(default_factory=dict)
    # Successors remembered per node.
    remembered: int = REMEMBER


@dataclass(frozen=True, slots=True)
class EaglePass(DraftPass[TreeCache]):
    """See ``DraftPass``, of a session of a head."""

    # [n, H]: true features as the layer takes them, or earlier guesses.
    features: torch.Tensor
    held: _Session


class EagleSource(TokenSource):
    """An EAGLE head with a tree cache per session. One thread only; ``Tensors`` of its features."""

    def __init__(self, head: EagleHead, context: int) -> None:
        self.head = head
        # Rows that went through the layer, over all sessions.
        self.rows_computed = 0
        # Longest sequence of the target. A head's own limit is none: it goes on, guessing worse.
        self._context = context
        self._sessions: dict[SessionId, _Session] = {}
        self._given_up = AbandonedJobs()
        # Features of the positions that come next.
        self._fed: dict[SessionId, list[torch.Tensor]] = {}

    @property
    def features(self) -> Features:
        """What ``extend`` has to be given of the target."""
        return self.head.features

    @property
    def token_bytes(self) -> int:
        """See ``head.token_bytes``."""
        return token_bytes(self.head.cache_shape, self.features)

    def known(self, session: SessionId) -> int:
        """Committed tokens the source knows of a session; 0 before it is extended."""
        found = self._sessions.get(session)
        return 0 if found is None else found.trie.length + 1

    def extend(
        self, session: SessionId, features: torch.Tensor, tokens: Sequence[int]
    ) -> Coroutine[EaglePass, None]:
        """Commit ``tokens`` [n]; ``features`` [n, ``features.width``] are those of the position
        *before* each. The first token of a session is never given: it has no position before it.

        Opens the session if need be. Raises ``ValueError`` where the shapes do not fit, or for a
        token that is not in the vocabulary.
        """
        self._check_rows(features, tokens)
        held = self._sessions.setdefault(
            session, _Session(TreeCache(self.head.cache_shape, self._context))
        )
        if not len(tokens):
            return
        held.trie.forget_tree()
        held.guesses.clear()
        for i in range(0, len(tokens), CHUNK):
            chunk = tokens[i : i + CHUNK]
            with torch.inference_mode():
                known = self.head.known(features[i : i + CHUNK].to(self.head.dtype))
            committed = held.trie.length
            rows = held.trie.append(chunk)
            nodes = [held.trie.tip] if i + CHUNK >= len(tokens) else []
            yield EaglePass(held.cache, committed, rows, chunk, nodes, known, held)

    def grower(self, job: Expand) -> TrieGrower[EaglePass]:
        held = self._sessions.get(job.session) or _Session(TreeCache(self.head.cache_shape, 0))
        most = self.head.geometry.draft_vocab_size
        if min(job.width, most) > held.remembered and held.guesses:
            held.remembered = min(job.width, most)
            with torch.inference_mode():
                guesses = torch.stack([*held.guesses.values()])
                proposals = self.head.successors(guesses, held.remembered)
            for node, proposal in zip(held.guesses, proposals, strict=True):
                held.trie.learn(node, proposal)
        return TrieGrower(
            held.trie,
            self._context - self.known(job.session),
            most,
            lambda wanted: _tree_pass(held, wanted),
            lambda: self._given_up.has(job),
        )

    def release(self, session: SessionId) -> None:
        self._sessions.pop(session, None)
        self._fed.pop(session, None)
        self._given_up.forget(session)

    def pack(self, rows: TensorRows) -> WireTensor:
        return to_wire(rows)

    def unpack(self, tensor: WireTensor) -> object:
        """See ``Tensors``: features [n, ``features.width``] in the type the target computes in."""
        return from_wire(tensor, self.head.dtype, self.features.width)

    def abandon(self, job: FeatureJob) -> None:
        self._given_up.note(job)

    def check(self) -> None:
        """Raise ``AssertionError`` where a session's bookkeeping contradicts itself (tests)."""
        for held in self._sessions.values():
            held.trie.check()
            held.cache.check(held.trie.length)
            nodes = (
                {held.trie.tip, *held.trie.slots.speculative_nodes} if held.trie.length else set()
            )
            assert held.guesses.keys() == nodes

    def feed(self, job: Feed) -> None:
        fed = self._fed.setdefault(job.session, [])
        known = max(self.known(job.session) - 1, 0) + sum(map(len, fed))
        if job.start != known:
            raise ValueError(f"features from position {job.start} on, {known} are known")
        fed.extend(select(rows) for rows in job.rows)

    def commit(self, job: Expand) -> Coroutine[EaglePass, int]:
        known = self.known(job.session)
        if known != job.base:
            raise ValueError(f"the EAGLE head knows {known} tokens, not {job.base}")
        if job.base or job.committed:
            tokens = job.committed[0 if job.base else 1 :]
            features = self._take(job.session, len(tokens))
            yield from self.extend(job.session, features, tokens)
        return self.known(job.session)

    def _take(self, session: SessionId, count: int) -> torch.Tensor:
        """The oldest ``count`` features that were fed and not taken yet, or all there are."""
        fed = self._fed.pop(session, [])
        features = torch.cat(fed) if fed else torch.empty(0, self.features.width)
        if len(features) > count:
            self._fed[session] = [features[count:]]
        return features[:count]

    def _check_rows(self, features: torch.Tensor, tokens: Sequence[int]) -> None:
        want = (len(tokens), self.features.width)
        if tuple(features.shape) != want:
            raise ValueError(f"features of shape {tuple(features.shape)}, expected {want}")
        vocab = self.head.geometry.vocab_size
        if len(tokens) and not 0 <= min(tokens) <= max(tokens) < vocab:
            raise ValueError(f"a token that is not in the vocabulary of {vocab}")

    def compute(self, passes: Sequence[EaglePass]) -> None:
        """See ``TokenSource``: what was wanted is in the sessions' books after."""
        with torch.inference_mode():
            shared = BatchedDraftPass(passes)
            self.rows_computed += shared.count
            features = torch.cat([one.features for one in passes])
            tokens = torch.tensor([token for one in passes for token in one.tokens])
            guesses = self.head.guess(features, tokens, shared.positions, shared.tree)
            if not shared.wanted:
                return
            # A copy, or rows that nobody asks about would be kept.
            guesses = guesses[shared.wanted]
            most = max(one.held.remembered for one in passes)
            found = iter(zip(guesses, self.head.successors(guesses, most), strict=True))
        for one in passes:
            for node in one.nodes:
                one.held.guesses[node], proposal = next(found)
                one.held.trie.learn(node, proposal)


def _tree_pass(held: _Session, wanted: Wanted) -> EaglePass:
    committed = held.trie.length
    ids, rows = held.trie.add_child(wanted)
    features = torch.stack([held.guesses[parent] for parent, _ in wanted])
    return EaglePass(held.cache, committed, rows, [t for _, t in wanted], ids, features, held)


def load_eagle(name: str | Path, target: Checkpoint, *, dtype: str = "auto") -> EagleSource:
    """Open a head made for ``target`` and read it. Raises ``UserError`` or ``CheckpointError``."""
    head = load_head(open_eagle(name, target.info), target, dtype)
    return EagleSource(head, target.info.context_length)
