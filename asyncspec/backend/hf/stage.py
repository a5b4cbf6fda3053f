"""A pipeline stage on a Hugging Face checkpoint: ``StageBackend`` for ``asyncspec.core.jobs``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncspec.backend.base import Guarantee, Mode, Quantize, WireTensor
from asyncspec.backend.hf.attention import (
    BatchedAttention,
    ExactAttention,
    FastAttention,
    TreeAttention,
)
from asyncspec.backend.hf.cache import POSITION_BYTES, KVCache
from asyncspec.backend.hf.checkpoint import Checkpoint, resolve_dtype
from asyncspec.backend.hf.eagle.hidden_states import capture_hidden_states
from asyncspec.backend.hf.formats.settings import check_requantized
from asyncspec.backend.hf.kernels.cpu.capabilities import FAST, KernelSettings
from asyncspec.backend.hf.kernels.cpu.dense import tune_min_rows
from asyncspec.backend.hf.kernels.cpu.quantized import check_quantize
from asyncspec.backend.hf.model_config import read_config, text_config
from asyncspec.backend.hf.probing import noise
from asyncspec.backend.hf.process import free_heap
from asyncspec.backend.hf.self_test import choose_settings, confirm
from asyncspec.backend.hf.shard import Shard, load_shard
from asyncspec.backend.hf.wire import from_wire, select, to_wire
from asyncspec.backend.tree_stage import TreeStage
from asyncspec.core.jobs import Batch, Forward, StageJob, TensorRows


class HFStage(TreeStage[KVCache]):
    """Layers of a checkpoint."""

    def __init__(
        self, shard: Shard, mode: Mode, settings: KernelSettings, guarantee: Guarantee
    ) -> None:
        super().__init__(shard.info, (shard.layers.start, shard.layers.stop), guarantee)
        self.shard = shard
        self.mode = mode
        self.settings = settings
        self.weights = shard.describe()
        self._shape = shard.cache_shape(mode)

    def run(self, job: StageJob) -> object | None:
        with torch.inference_mode():
            return super().run(job)

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(self._shape, capacity)

    def pack(self, rows: TensorRows) -> WireTensor:
        return to_wire(rows)

    def unpack(self, tensor: WireTensor) -> object:
        return from_wire(tensor, self.shard.dtype, self.info.hidden_size, captured=True)

    def noise(self, rows: int) -> Tensor:
        return noise(rows, self.info.hidden_size).to(self.shard.dtype)

    def cache_bytes(self, slots: int) -> int:
        return slots * max(self._shape.slot_bytes(), POSITION_BYTES)

    @property
    def session_bytes(self) -> int:
        return self._shape.session_bytes()

    def compute(self, job: Forward | Batch, passes: Sequence[Forward]) -> tuple[object, ...]:
        sessions = [self.begin(one) for one in passes]
        inputs = [self._inputs(one) for one in passes]
        trees = [self._attention(s.cache, one) for s, one in zip(sessions, passes, strict=True)]
        batch = BatchedAttention(trees)
        tree = trees[0] if len(trees) == 1 else batch
        tree.stop = lambda: self._abandoned is job
        depths = {depth for session in sessions for depth in session.depths}
        # ``cat`` copies: layers get the same strides with and without captured hidden states.
        hidden = torch.cat([rows[:, 0] if rows.dim() == 3 else rows for rows in inputs])
        sampled = [
            own.start + row
            for one, own in zip(passes, batch.slices, strict=True)
            for row in one.sampled_rows
        ]
        with capture_hidden_states(self.shard, depths) as captured:
            if sampled:
                output = self.shard.logits(hidden, batch.positions, tree, torch.tensor(sampled))
            else:
                output = self.shard.hidden(hidden, batch.positions, tree)
        results: list[object] = []
        start = 0
        for one, session, rows, own in zip(passes, sessions, inputs, batch.slices, strict=True):
            earlier = rows[:, 1:].unbind(1) if rows.dim() == 3 else ()
            states = [*earlier, *(captured[depth][own] for depth in session.depths)]
            if self.has_head:
                end = start + len(one.sampled_rows)
                features = torch.cat(states, 1) if session.admit.features else None
                logits = output[start:end].float().numpy()
                results.append(session.sample(one, logits, features))
                start = end
            else:
                results.append(torch.stack([output[own], *states], 1) if states else output[own])
        return tuple(results)

    def _attention(self, cache: KVCache, job: Forward) -> TreeAttention:
        if self.mode == "exact":
            return ExactAttention(cache, job.committed, job.rows, self.settings)
        return FastAttention(cache, job.committed, job.rows)

    def _inputs(self, job: Forward) -> Tensor:
        """Tokens [n], hidden states [n, H] or, with captured ones, [n, 1 + captured, H]."""
        if self.has_embedding:
            return torch.tensor(job.tokens)
        assert job.hidden is not None, "checked by ``begin``"
        return select(job.hidden)


def load_stage(
    checkpoint: Checkpoint,
    first: int,
    last: int,
    *,
    dtype: str = "auto",
    mode: Mode = "exact",
    settings: KernelSettings | None = None,
    quantize: Quantize = "none",
) -> HFStage:
    """Read layers [first, last) as a stage. In exact mode the kernels are measured first, unless
    ``settings`` are given, and the loaded stage is tested. Raises ``UserError`` or
    ``CheckpointError`` with what to change."""
    check_quantize(quantize)
    check_requantized(text_config(read_config(checkpoint.path)), quantize)
    torch_dtype = resolve_dtype(checkpoint.info, dtype)
    with torch.inference_mode():
        initial = FAST if mode == "fast" else settings or KernelSettings()
        shard = load_shard(checkpoint, first, last, torch_dtype, mode, initial, quantize=quantize)
        free_heap(shard.weight_bytes)
        if mode == "fast":
            tune_min_rows(shard.linears)
            return HFStage(shard, mode, initial, "tolerance")
        if settings is None:
            settings = choose_settings(shard)
            tune_min_rows(shard.linears)
        return HFStage(shard, mode, settings, confirm(shard, settings))
