"""An EAGLE head as a token source: EAGLE-2's tree (its section 4) from the target's own features.

The committed rows of a session's cache are made of true features and never computed again. Rows
of the tree are made of predictions. When the next true features come, a tree below the tip is
predicted anew, as everything in it was built on a prediction; one that goes on below its leaves
stays as it was, as it would take a pass a level to predict it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from msgspec.structs import replace as struct_replace

from asyncspec.backend.base import SharingModel
from asyncspec.backend.draft_model import (
    A,
    CachedSession,
    CachedSource,
    DraftPass,
    ModelSource,
    learn,
    prompt_passes,
)
from asyncspec.backend.draft_trie import Wanted
from asyncspec.backend.reference import CHUNK
from asyncspec.core.jobs import Feed, Row, TensorRows
from asyncspec.core.tensors import WireTensor
from asyncspec.core.tree import TIP
from asyncspec.plugins.hf.attention.attention import TreeMask
from asyncspec.plugins.hf.attention.cache import CacheShape, KVCache
from asyncspec.plugins.hf.checkpoint.checkpoint import Checkpoint
from asyncspec.plugins.hf.heads.draft_model import BatchedDraftPass
from asyncspec.plugins.hf.heads.eagle.checkpoint import EagleCheckpoint, open_eagle
from asyncspec.plugins.hf.heads.eagle.description import Features
from asyncspec.plugins.hf.heads.eagle.head import load_head, token_bytes
from asyncspec.plugins.hf.kernels.device import CPU, Device
from asyncspec.plugins.hf.model.wire import from_wire, select, to_wire
from asyncspec.source.expand import Grower, Proposal
from asyncspec_protocol.ids import NodeId, SessionId
from asyncspec_protocol.messages import Expand


@dataclass(slots=True)
class EagleSession(CachedSession[KVCache]):
    """A session; its trie has a row per committed token but the first, which has no feature."""

    # [H] each: of the last committed row and of all rows of the tree.
    predicted: dict[NodeId, torch.Tensor] = field(default_factory=dict)
    # Whether the tree was predicted before the last true features came.
    older: bool = False
    # Committed rows, which the next pass of the tree computes too.
    deferred: DraftPass[EagleSession] | None = None

    def drop_all(self) -> None:
        """Forget all below the tip, and its own successors."""
        self.trie.forget_tree()
        self.predicted.clear()
        self.older = False

    def drop_tree(self) -> None:
        """Forget all below the tip, whose own successors stay."""
        self.trie.forget_below()
        self.keep_predictions()
        self.older = False

    def keep_predictions(self) -> None:
        """Those of the tip and the tree, and no others."""
        kept = {self.trie.tip, *self.trie.slots.speculative_nodes}
        self.predicted = {node: x for node, x in self.predicted.items() if node in kept}


class FedFeatures:
    """Features that came and whose tokens are not committed yet, by session."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._fed: dict[SessionId, list[torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self._fed)

    def feed(self, job: Feed, length: int) -> None:
        """``length``: committed tokens of the session. Raises ``ValueError`` for a gap."""
        fed = self._fed.setdefault(job.session, [])
        # The last committed token has no feature yet.
        end = max(length - 1, 0) + sum(map(len, fed))
        if job.start != end:
            raise ValueError(f"features from position {job.start} on, {end} are known")
        fed.extend(select(rows) for rows in job.rows)

    def take(self, session: SessionId, count: int) -> torch.Tensor:
        """The oldest ``count`` features [count, width]. Raises ``ValueError`` where there are
        fewer, or of another width."""
        fed = self._fed.pop(session, [])
        features = torch.cat(fed) if fed else torch.empty(0, self._width)
        if len(features) > count:
            self._fed[session] = [features[count:]]
        features = features[:count]
        if features.shape != (count, self._width):
            want = (count, self._width)
            raise ValueError(f"features of shape {tuple(features.shape)}, expected {want}")
        return features

    def release(self, session: SessionId) -> None:
        """Forget a session."""
        self._fed.pop(session, None)


def check_tokens(tokens: Sequence[int], vocab: int) -> None:
    """Raises ``ValueError`` for a token that is not in the vocabulary."""
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab:
        raise ValueError(f"a token that is not in the vocabulary of {vocab}")


class FeatureSource(ModelSource[A]):
    """A head that reads the target's features; ``Tensors`` of them. A head's own context is no
    limit: beyond it, its predictions are worse."""

    def set_features(self, features: Features, dtype: torch.dtype) -> None:
        """What it reads, and what the target computes in."""
        self.features = features
        self._dtype = dtype
        self._fed = FedFeatures(features.width)

    def feed(self, job: Feed) -> None:
        self._fed.feed(job, self.known(job.session))

    def release(self, session: SessionId) -> None:
        super().release(session)
        self._fed.release(session)

    def pack(self, rows: TensorRows) -> WireTensor:
        return to_wire(rows)

    def unpack(self, tensor: WireTensor) -> object:
        """See ``Tensors``: features [n, ``features.width``] in the type the target computes in."""
        return from_wire(tensor, self._dtype, self.features.width)


def best_products(job: Expand) -> Expand:
    """The job with as many nodes of a level as the tree can have: where all levels come of one
    pass, the best products of their distributions cost nothing."""
    return job if job.fixed_width else struct_replace(job, beam=max(job.beam, job.count))


class FeatureHead(Protocol):
    """What proposes from the target's features: an EAGLE head, or a target's next-token layer.

    Row i reads the feature of position i and the token after it, and predicts the next feature.
    """

    features: Features
    dtype: torch.dtype
    device: Device
    cache_shape: CacheShape
    # The target's vocabulary, and how many tokens of it can be proposed.
    vocab_size: int
    draft_vocab_size: int

    def layer_features(self, features: torch.Tensor) -> torch.Tensor:
        """True features [n, ``features.width``] as a pass takes them: [n, H]."""

    def predict(
        self,
        features: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        tree: TreeMask,
    ) -> torch.Tensor:
        """The next features [n, H] of some rows: ``features`` [n, H] are known ones or earlier
        predictions, ``tokens`` [n] what follows them."""

    def successors(self, predicted: torch.Tensor, count: int) -> list[Proposal]:
        """The target's tokens that come next, by predictions [n, H]."""


class EagleSource(FeatureSource[EagleSession], CachedSource[EagleSession]):
    """A head with a tree cache per session. One thread only."""

    def __init__(self, head: FeatureHead, context: int) -> None:
        super().__init__(context, head.draft_vocab_size)
        self.set_features(head.features, head.dtype)
        self.head = head
        self.token_bytes = token_bytes(head.cache_shape, head.features)

    def open_session(self) -> EagleSession:
        return EagleSession(KVCache(self.head.cache_shape, self._context, self.head.device))

    def advance(self, session: EagleSession, job: Expand) -> Iterator[DraftPass[EagleSession]]:
        """See ``CachedSource``. Raises ``ValueError`` where features are missing, or for a token
        that is not in the vocabulary."""
        # The first token of a session has no position before it, and so no row.
        tokens = job.committed[0 if job.base else 1 :]
        features = self._fed.take(job.session, len(tokens))
        check_tokens(tokens, self.head.vocab_size)
        # Below leaves, and not from the tip.
        continues = max(job.frontier, default=TIP) != TIP
        deferred = session.deferred
        if deferred is not None and (tokens or not continues):
            session.deferred = None
            yield deferred
        if not tokens:
            if session.older and not continues:
                session.drop_tree()
            return
        features = features.to(self.head.dtype)
        if continues and len(tokens) <= CHUNK and session.trie.leads_through(tokens):
            session.deferred = replace(_moved(session, tokens), features=self._known(features))
            return
        session.drop_all()
        passes = prompt_passes(session, tokens)
        for draft_pass, chunk in zip(passes, torch.split(features, CHUNK), strict=True):
            yield replace(draft_pass, features=self._known(chunk))

    def _known(self, features: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return self.head.layer_features(self.head.device.put(features))

    def grower(self, job: Expand) -> Grower:
        self.remember(self._sessions[job.session], min(job.width, self.vocab))
        return super().grower(job)

    def remember(self, session: EagleSession, width: int) -> None:
        """So many successors of every node."""
        if width > session.remembered and session.predicted:
            session.remembered = width
            with torch.inference_mode():
                predicted = torch.stack([*session.predicted.values()])
                proposals = self.head.successors(predicted, width)
            for node, proposal in zip(session.predicted, proposals, strict=True):
                session.trie.learn(node, proposal)

    def tree_pass(self, session: EagleSession, wanted: Wanted) -> DraftPass[EagleSession]:
        features = torch.stack([session.predicted[parent] for parent, _ in wanted])
        tree = replace(super().tree_pass(session, wanted), features=features)
        first, session.deferred = session.deferred, None
        return tree if first is None else _in_one_pass(first, tree)

    def compute(self, passes: Sequence[DraftPass[EagleSession]]) -> None:
        with torch.inference_mode():
            shared = BatchedDraftPass(passes)
            features = torch.cat([one.features for one in passes])
            tokens = self.head.device.integers([x for one in passes for x in one.tokens])
            predicted = self.head.predict(features, tokens, shared.positions, shared.tree)
            if not shared.wanted:
                return
            # A copy: a view would keep the rows of other nodes in memory.
            predicted = predicted[shared.wanted]
            count = max(one.session.remembered for one in passes)
            learn(passes, self.head.successors(predicted, count))
        nodes = ((one.session, node) for one in passes for node in one.nodes)
        for (session, node), feature in zip(nodes, predicted, strict=True):
            session.predicted[node] = feature

    def check(self) -> None:
        super().check()
        for session in self._sessions.values():
            trie = session.trie
            nodes = {trie.tip, *trie.slots.speculative_nodes} if trie.length else set()
            assert session.predicted.keys() == nodes


def _moved(session: EagleSession, tokens: Sequence[int]) -> DraftPass[EagleSession]:
    """The tip moves along nodes of the tree, and what is below them stays: the pass that replaces
    their rows of predictions."""
    trie, start = session.trie, session.trie.length
    _, stay = trie.advance(tokens)
    if stay is not None:
        session.cache.compact(start, stay)
    session.keep_predictions()
    session.older = True
    return DraftPass(session, start, trie.committed_rows(start), tokens, [trie.tip])


def _in_one_pass(
    first: DraftPass[EagleSession], tree: DraftPass[EagleSession]
) -> DraftPass[EagleSession]:
    """Committed rows, and rows of the tree, which see them."""
    above = tuple(range(first.committed, tree.committed))
    return replace(
        first,
        rows=(*first.rows, *[Row(r.slot, r.position, (*above, *r.visible)) for r in tree.rows]),
        tokens=(*first.tokens, *tree.tokens),
        nodes=(*first.nodes, *tree.nodes),
        features=torch.cat([first.features, tree.features]),
    )


def load_eagle(
    name: str | Path | EagleCheckpoint,
    target: Checkpoint | SharingModel,
    *,
    dtype: str = "auto",
    device: Device = CPU,
    kind: type[EagleSource] = EagleSource,
) -> EagleSource:
    """Open a head made for ``target`` and read it. Raises ``UserError`` or ``CheckpointError``."""
    opened = name if isinstance(name, EagleCheckpoint) else open_eagle(name, target.info)
    return kind(load_head(opened, target, dtype, device), target.info.context_length)
