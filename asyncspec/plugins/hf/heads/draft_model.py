"""A draft model by torch, and what sessions need of one draft pass, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from asyncspec.backend.base import Quantize
from asyncspec.backend.draft_model import (
    UNLIKELY,
    CachedDraftModel,
    CachedSession,
    DraftPass,
    learn,
)
from asyncspec.plugins.hf.attention.attention import TreeMask
from asyncspec.plugins.hf.attention.batched_attention import attention_of
from asyncspec.plugins.hf.attention.cache import KVCache
from asyncspec.plugins.hf.checkpoint.checkpoint import Checkpoint, resolve_dtype
from asyncspec.plugins.hf.kernels.cpu.dense import tune_min_rows
from asyncspec.plugins.hf.kernels.cpu.quantized import check_quantize
from asyncspec.plugins.hf.kernels.device import CPU, Device
from asyncspec.plugins.hf.kernels.dispatch import fast_settings
from asyncspec.plugins.hf.kernels.process import free_heap
from asyncspec.plugins.hf.model.shard import Shard, load_shard
from asyncspec.source.expand import Proposal

S = TypeVar("S", bound=CachedSession[KVCache])


def best_successors(logits: Tensor, count: int, ids: Tensor | None = None) -> list[Proposal]:
    """Per row of ``logits`` [n, vocab] the ``count`` best tokens and their log-probabilities.
    ``ids`` [vocab]: the token each column means, where it is not the column's number."""
    logits = logits.float()
    best = logits.topk(min(count, logits.shape[-1]), dim=-1)
    # Rounding must not make a token more than certain.
    log_probs = (best.values - logits.logsumexp(-1, keepdim=True)).clamp(max=0.0)
    tokens = best.indices if ids is None else ids[best.indices]
    return list(zip(tokens.tolist(), log_probs.tolist(), strict=True))


class BatchedDraftPass:
    """The rows of all ``parts``, one part after the other."""

    def __init__(self, parts: Sequence[DraftPass[S]]) -> None:
        batch = attention_of([(part.session.cache, part.committed, part.rows) for part in parts])
        self.count, self.positions = batch.count, batch.positions
        self.tree: TreeMask = batch
        # The rows whose successors are wanted.
        self.wanted: list[int] = []
        for part, rows in zip(parts, batch.slices, strict=True):
            self.wanted += range(rows.stop - len(part.nodes), rows.stop)


class DraftModel(CachedDraftModel[KVCache]):
    """A whole model on torch. One thread only."""

    def __init__(self, shard: Shard, vocab: int | None = None, foreign: Sequence[int] = ()) -> None:
        """``foreign``: tokens that are not the target's, and are not drafted."""
        self.shard = shard
        self._shape = shard.cache_shape("fast")
        # Held for each token of a session, and for each node of its tree.
        self.token_bytes = self._shape.max_slot_bytes()
        self.session_bytes = self._shape.session_bytes()
        vocab_size = shard.info.vocab_size
        super().__init__(shard.info.context_length, min(vocab_size, vocab or vocab_size))
        self._foreign = [token for token in foreign if token < self.vocab]

    def new_cache(self) -> KVCache:
        return KVCache(self._shape, self._context, self.shard.device)

    def compute(self, passes: Sequence[DraftPass[CachedSession[KVCache]]]) -> None:
        # Two models may share a tokenizer and still pad their vocabularies to different sizes.
        vocab_size = self.shard.info.vocab_size
        tokens = [token if token < vocab_size else 0 for one in passes for token in one.tokens]
        with torch.inference_mode():
            shared = BatchedDraftPass(passes)
            device = self.shard.device
            where = (device.integers(tokens), shared.positions, shared.tree)
            if not shared.wanted:
                self.shard.hidden(*where)
                return
            logits = self.shard.logits(*where, device.integers(shared.wanted))
            count = max(job.session.remembered for job in passes)
            logits = logits[:, : self.vocab]
            if self._foreign:
                logits = logits.float().index_fill(1, device.integers(self._foreign), UNLIKELY)
            learn(passes, best_successors(logits, count))


def load_draft(
    checkpoint: Checkpoint,
    *,
    dtype: str = "auto",
    vocab: int | None = None,
    quantize: Quantize = "none",
    device: Device = CPU,
    foreign: Sequence[int] = (),
) -> DraftModel:
    """Read a draft model for a target of ``vocab`` tokens. ``foreign``: those that are not
    drafted. Raises as ``load_stage``."""
    if not device.is_accelerator:
        check_quantize(quantize)
    layers, torch_dtype = checkpoint.info.layers, resolve_dtype(checkpoint.info, dtype)
    with torch.inference_mode():
        shard = load_shard(
            checkpoint,
            *(0, layers, torch_dtype, "fast", fast_settings(device)),
            quantize=quantize,
            # On the CPU a packed copy of it is faster.
            share_tied=device.is_accelerator,
            device=device,
        )
        free_heap(shard.weight_bytes)
        tune_min_rows(shard.linears)
        shard.warm_up()
    return DraftModel(shard, vocab, foreign)
