"""A GGUF draft model on llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from asyncspec.backend.base import DEFAULT_OPTIONS, EngineOptions
from asyncspec.backend.draft_model import (
    UNLIKELY,
    CachedDraftModel,
    CachedSession,
    DraftPass,
    learn,
)
from asyncspec.backend.sampling import best_successors
from asyncspec.plugins.llama.attention import flash_type
from asyncspec.plugins.llama.cache_engine import CacheEngine, Settings
from asyncspec.plugins.llama.cut import VirtualFile, cut
from asyncspec.plugins.llama.devices import find
from asyncspec.plugins.llama.footprint import footprint, sequences
from asyncspec.plugins.llama.library import load_model
from asyncspec.plugins.llama.recurrent import new_engine
from asyncspec.plugins.llama.target import OpenTarget
from asyncspec.plugins.llama.tree import TreeCache
from asyncspec.plugins.llama.trial import repacks


class LlamaDraft(CachedDraftModel[TreeCache]):
    """A whole small model. One thread only. ``token_bytes``: held for each token of a session, and
    for each node of its tree."""

    def __init__(
        self,
        engine: CacheEngine[Any],
        context: int,
        vocab: int,
        token_bytes: int,
        foreign: Sequence[int] = (),
    ) -> None:
        """``foreign``: tokens that are not the target's, and are not drafted."""
        super().__init__(context, min(vocab, engine.model.vocab_size))
        self._foreign = [token for token in foreign if token < self.vocab]
        self.engine = engine
        self.token_bytes = token_bytes

    def new_cache(self) -> TreeCache:
        return TreeCache(self.engine)

    def compute(self, passes: Sequence[DraftPass[CachedSession[TreeCache]]]) -> None:
        vocab_size = self.engine.model.vocab_size
        rows, wanted = [], []
        for job in passes:
            # Two models may share a tokenizer and still pad their vocabularies differently.
            tokens = [token if token < vocab_size else 0 for token in job.tokens]
            cache = job.session.cache
            nodes = cache.grow(job.committed, job.rows, tokens)
            rows += [(cache.branches, node) for node in nodes]
            unasked = len(nodes) - len(job.nodes)
            wanted += [False] * unasked + [True] * len(job.nodes)
        logits = self.engine.run(rows, wanted).logits[:, : self.vocab]
        if len(logits):
            if self._foreign:
                logits = logits.copy()
                logits[:, self._foreign] = UNLIKELY
            count = max(job.session.remembered for job in passes)
            learn(passes, best_successors(logits, count))


def load_draft(
    draft: OpenTarget,
    vocab: int,
    options: EngineOptions = DEFAULT_OPTIONS,
    foreign: Sequence[int] = (),
) -> LlamaDraft:
    """Load a whole model as a draft of a target with so many tokens. ``foreign``: those that are
    not drafted. Raises ``UserError``."""
    span = (0, draft.info.layers)
    gpu = find(options.device)
    repack = repacks(draft, span, "fast", options)
    file = VirtualFile(*cut(draft.model, *span))
    model = load_model(file, str(draft.path), device=gpu.handle if gpu else 0, repack=repack)
    settings = Settings(
        exact=False,
        flash=flash_type(replace(options, kv_type="auto"), "fast", on_gpu=gpu is not None),
        device=gpu.name if gpu else "",
        sequences=sequences(draft, span),
    )
    engine = new_engine(model, settings)
    slot = footprint(draft, span).slot
    return LlamaDraft(engine, draft.info.context_length, vocab, slot, foreign)
