"""P-EAGLE (arXiv:2602.01469): an EAGLE-3 head that proposes several tokens in one pass, as a token
source. Its tree is the best of the products of the rows' distributions, as DFlash's is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from asyncspec.backend.draft_model import DraftPass
from asyncspec.core.tree import TIP
from asyncspec.plugins.hf.attention.cache import KVCache
from asyncspec.plugins.hf.heads.eagle.description import ParallelShape
from asyncspec.plugins.hf.heads.eagle.head import Eagle3Head
from asyncspec.plugins.hf.heads.eagle.source import (
    EagleSession,
    EagleSource,
    FeatureHead,
    best_products,
)
from asyncspec.source.expand import NO_PROPOSAL, Coroutine, Grower, Proposal
from asyncspec_protocol.ids import NO_PARENT, NodeId
from asyncspec_protocol.messages import Expand, Expanded


@dataclass(slots=True)
class _Session(EagleSession):
    # The rows of mask tokens, from the tip down; empty until they are computed.
    masks: list[NodeId] = field(default_factory=list)


class ParallelEagleSource(EagleSource):
    """A P-EAGLE head with a cache per session."""

    def __init__(self, head: FeatureHead, context: int) -> None:
        super().__init__(head, context)
        assert isinstance(head, Eagle3Head)
        assert head.description.parallel is not None, "a head of another kind"
        assert head.mask_feature is not None
        self._shape, self._mask_feature = head.description.parallel, head.mask_feature

    def open_session(self) -> _Session:
        return _Session(KVCache(self.head.cache_shape, self._context, self.head.device))

    def draft(self, job: Expand) -> Coroutine[DraftPass[EagleSession], Expanded]:
        return super().draft(best_products(job))

    def grower(self, job: Expand) -> Grower:
        session = self._sessions[job.session]
        assert isinstance(session, _Session)
        self.remember(session, min(job.width, self.vocab))
        if not set(session.masks) <= session.predicted.keys():
            session.masks = []
        levels = min(self._shape.levels, self._context - session.length)
        return _ParallelGrower(session, self._shape, levels, self._mask_feature)


class _ParallelGrower:
    """A ``Grower`` over the rows of one pass."""

    def __init__(
        self, session: _Session, shape: ParallelShape, levels: int, feature: torch.Tensor
    ) -> None:
        self._session = session
        self._mask_token = shape.mask_token
        self._masks = shape.levels - 1
        self._levels = levels if session.trie.tip != NO_PARENT else 0
        self._feature = feature
        # By candidate: its level below the tip.
        self._level = {TIP: 0}

    def add_child(self, parent: int, token: int) -> None:
        self._level[len(self._level) - 1] = self._level[parent] + 1

    def prepare(self, nodes: Sequence[int]) -> Iterator[DraftPass[EagleSession]]:
        session, trie = self._session, self._session.trie
        below = any(0 < self._level[node] < self._levels for node in nodes)
        if below and self._masks and not session.masks:
            tokens, committed = [self._mask_token] * self._masks, trie.length
            ids, rows = trie.add_chain(tokens)
            session.masks = [*ids]
            features = self._feature.expand(len(ids), -1)
            yield DraftPass(session, committed, rows, tokens, ids, features)

    def propose(self, nodes: Sequence[int], width: int) -> list[Proposal]:
        trie, rows = self._session.trie, [self._session.trie.tip, *self._session.masks]
        proposals = []
        for level in (self._level[node] for node in nodes):
            within = level < min(self._levels, len(rows))
            width = min(width, self._session.remembered)
            proposals.append(trie.proposal(rows[level], width) if within else NO_PROPOSAL)
        return proposals
