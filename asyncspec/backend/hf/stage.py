"""A pipeline stage on a Hugging Face checkpoint: ``LoadedStage`` for ``asyncspec.core.jobs``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from msgspec.structs import replace

from asyncspec.backend.base import Guarantee, Mode, Quantize, WireTensor
from asyncspec.backend.hf import sampling
from asyncspec.backend.hf.attention import (
    Abandoned,
    BatchedAttention,
    FastAttention,
    TreeAttention,
    TreeMask,
    row_slices,
)
from asyncspec.backend.hf.cache import TreeCache
from asyncspec.backend.hf.checkpoint import Checkpoint, resolve_dtype
from asyncspec.backend.hf.eagle.hidden_states import capture_hidden_states, depths_in
from asyncspec.backend.hf.exact_attention import ExactAttention
from asyncspec.backend.hf.kernels.cpu.capabilities import FAST, KernelSettings
from asyncspec.backend.hf.kernels.cpu.dense import tune_min_rows
from asyncspec.backend.hf.kernels.cpu.quantized import check_quantize
from asyncspec.backend.hf.probing import noise
from asyncspec.backend.hf.process import HeapTrimmer
from asyncspec.backend.hf.self_test import choose_settings, confirm
from asyncspec.backend.hf.shard import Shard, load_shard
from asyncspec.backend.hf.wire import from_wire, select, to_wire
from asyncspec.backend.pass_times import Trial, pass_seconds
from asyncspec.backend.slot_tokens import SlotTokens
from asyncspec.backend.stage_session import StageSession, checked_tokens
from asyncspec.core.jobs import (
    Admit,
    Batch,
    Compact,
    Forward,
    Release,
    SamplerOutput,
    StageJob,
    TensorRows,
    Trim,
)
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import FINAL

Output = torch.Tensor | tuple[int, ...] | SamplerOutput
"""Hidden states [n, H], or on the last stage sampled tokens."""


@dataclass(slots=True)
class _Session(StageSession):
    """A session's cache and request settings."""

    cache: TreeCache
    # Those of ``features`` that this stage computes.
    depths: tuple[int, ...]
    committed: int = 0

    def compact(self, start: int, keep: tuple[int, ...]) -> None:
        """See ``Compact``."""
        self.cache.compact(start, keep)
        if self.tokens is not None:
            self.tokens.compact(start, keep)

    def result(self, output: Output, captured: Sequence[torch.Tensor]) -> Output:
        """``output`` with the captured hidden states [n, H] of its rows, low to high."""
        if isinstance(output, tuple):
            if not self.features:
                return output
            return SamplerOutput(output, torch.cat(list(captured), dim=1))
        if isinstance(output, SamplerOutput):
            features = torch.cat(list(captured), dim=1) if self.features else None
            return replace(output, features=features)
        return torch.stack([output, *captured], dim=1) if captured else output


class HFStage:
    """Layers [first, last) of a checkpoint with a tree cache per session. Not thread-safe."""

    def __init__(
        self, shard: Shard, mode: Mode, settings: KernelSettings, guarantee: Guarantee
    ) -> None:
        self.shard = shard
        self.mode = mode
        self.settings = settings
        # See ``LoadedStage``.
        self.guarantee = guarantee
        self._shape = shard.cache_shape(mode)
        self._sessions: dict[SessionId, _Session] = {}
        self._abandoned: StageJob | None = None
        self._trimmer = HeapTrimmer()

    def run(self, job: StageJob) -> object | None:
        """See ``StageBackend``. Raises ``ValueError`` for an invalid job."""
        with torch.inference_mode():
            match job:
                case Admit():
                    self._admit(job)
                case Trim(session, slots):
                    self._trim(session, slots)
                case Release(session):
                    self._release(session)
                case Compact(session, start, keep):
                    self._session(session).compact(start, keep)
                case Forward():
                    return self._compute(job)[0]
                case Batch():
                    return self._compute(job)
        return None

    def abandon(self, job: StageJob) -> None:
        """See ``StageBackend``."""
        self._abandoned = job

    def pack(self, rows: TensorRows) -> WireTensor:
        """See ``StageBackend``."""
        return to_wire(rows)

    def unpack(self, tensor: WireTensor) -> object:
        """See ``StageBackend``."""
        return from_wire(tensor, self.shard.dtype, self.shard.info.hidden_size, captured=True)

    def check(self) -> None:
        """See ``StageBackend``."""
        for session in self._sessions.values():
            session.cache.check(session.committed)

    @property
    def weights(self) -> str:
        """See ``LoadedStage``."""
        return self.shard.describe()

    def pass_seconds(self) -> dict[int, float]:
        """See ``LoadedStage``."""
        return pass_seconds(self, self.trial)

    @property
    def trial(self) -> Trial:
        """Passes that are timed."""
        width, dtype = self.shard.info.hidden_size, self.shard.dtype
        vocab, has_head = self.shard.info.vocab_size, self.shard.has_head
        return Trial(lambda rows: noise(rows, width).to(dtype), vocab, has_head)

    def cache_bytes(self, slots: int) -> int:
        """See ``LoadedStage``."""
        return slots * self._shape.slot_bytes()

    @property
    def cache_bytes_held(self) -> int:
        """Memory of the caches of all sessions, in bytes."""
        return sum(session.cache.bytes_held for session in self._sessions.values())

    def _trim(self, session_id: SessionId, slots: int) -> None:
        session = self._session(session_id)
        before = session.cache.bytes_held
        session.cache, session.tokens = session.cache.trimmed(slots), None
        session.committed = min(session.committed, slots)
        self._trimmer.add(before)

    def _release(self, session_id: SessionId) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            freed = session.cache.bytes_held
            del session
            self._trimmer.add(freed)

    def _admit(self, job: Admit) -> None:
        if job.session in self._sessions:
            raise ValueError(f"session {job.session} is admitted already")
        if job.common_prefix and job.sampling.penalises:
            raise ValueError("a session that penalises tokens must read them all")
        needs_tokens = self.shard.has_head and job.sampling.penalises
        cache = TreeCache(self._shape, job.capacity)
        if job.common_prefix:
            cache.copy_prefix(self._session(job.parent_session).cache, job.common_prefix)
        self._sessions[job.session] = _Session(
            cache=cache,
            sampling=job.sampling,
            tokens=SlotTokens(job.prompt_length) if needs_tokens else None,
            features=job.features,
            depths=depths_in(self.shard, job.features),
            top_logprobs=job.top_logprobs,
            log_probs=job.log_probs,
        )

    def _compute(self, job: Forward | Batch) -> tuple[object, ...]:
        """The result of each pass of a job."""
        passes = job.passes if isinstance(job, Batch) else (job,)
        sessions = [self._session(one.session) for one in passes]
        inputs = [self._inputs(one) for one in passes]
        # Contiguous: the layers get the same strides with and without captured hidden states.
        earlier = [rows[:, 1:].unbind(1) if rows.dim() == 3 else () for rows in inputs]
        inputs = [rows[:, 0].contiguous() if rows.dim() == 3 else rows for rows in inputs]
        trees = [self._attention(s.cache, one) for s, one in zip(sessions, passes, strict=True)]
        tree: TreeMask = trees[0] if len(trees) == 1 else BatchedAttention(trees)
        tree.stop = lambda: self._abandoned is job
        depths = sorted({depth for session in sessions for depth in session.depths}, key=_order)
        try:
            with capture_hidden_states(self.shard, depths) as captured:
                outputs = self._pass(
                    passes, sessions, inputs[0] if len(inputs) == 1 else torch.cat(inputs), tree
                )
        except Abandoned:
            return ((),) * len(passes)
        by_depth = dict(zip(depths, captured, strict=True))
        hidden_states = (
            [*before, *(by_depth[depth][own] for depth in session.depths)]
            for before, session, own in zip(earlier, sessions, row_slices(trees), strict=True)
        )
        return tuple(map(_Session.result, sessions, outputs, hidden_states))

    def _pass(
        self,
        passes: Sequence[Forward],
        sessions: Sequence[_Session],
        inputs: torch.Tensor,
        tree: TreeMask,
    ) -> Sequence[Output]:
        """For each session hidden states [n, H], or on the last stage what was sampled."""
        rows = [row for one in passes for row in one.rows]
        positions = torch.from_numpy(np.array([row.position for row in rows], np.int64))
        for one, session in zip(passes, sessions, strict=True):
            session.committed = one.committed
            if session.tokens is not None:
                session.tokens.write(
                    one.committed, one.rows, checked_tokens(one, self.shard.info.vocab_size)
                )
        starts = accumulate((len(one.rows) for one in passes), initial=0)
        sampled = [
            start + row
            for one, start in zip(passes, starts, strict=False)
            for row in one.sampled_rows
        ]
        if not sampled:
            hidden = self.shard.hidden(inputs, positions, tree)
            if self.shard.has_head:
                return [()] * len(passes)
            return torch.split_with_sizes(hidden, [len(one.rows) for one in passes])
        if not self.shard.has_head:
            raise ValueError("only the last stage samples")
        logits = self.shard.logits(inputs, positions, tree, torch.tensor(sampled))
        own = torch.split_with_sizes(logits, [len(one.sampled_rows) for one in passes])
        parts = zip(passes, sessions, own, strict=True)
        return [session.sample(one, rows, sampling) for one, session, rows in parts]

    def _attention(self, cache: TreeCache, job: Forward) -> TreeAttention:
        if self.mode == "exact":
            return ExactAttention(cache, job.committed, job.rows, self.settings)
        return FastAttention(cache, job.committed, job.rows)

    def _inputs(self, job: Forward) -> torch.Tensor:
        """Tokens [n], hidden states [n, H] or, with captured ones, [n, 1 + captured, H]."""
        if self.shard.has_embedding:
            return torch.tensor(checked_tokens(job, self.shard.info.vocab_size))
        if job.hidden is None or len(job.hidden.rows) != len(job.rows) or not job.rows:
            raise ValueError(f"no hidden states for {len(job.rows)} rows")
        return select(job.hidden)

    def _session(self, session: SessionId) -> _Session:
        if session not in self._sessions:
            raise ValueError(f"session {session} was never admitted")
        return self._sessions[session]


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
    ``settings`` are given, and the loaded stage is tested afterwards. ``quantize``: how the weights
    are kept (docs/guide/own-models.md).

    Raises ``UserError`` or ``CheckpointError`` with what to change.
    """
    check_quantize(quantize)
    torch_dtype = resolve_dtype(checkpoint.info, dtype)
    with torch.inference_mode():
        initial = FAST if mode == "fast" else settings or KernelSettings()
        shard = load_shard(checkpoint, first, last, torch_dtype, mode, initial, quantize=quantize)
        HeapTrimmer().add(shard.weight_bytes)
        if mode == "fast":
            tune_min_rows(shard.linears)
            return HFStage(shard, mode, initial, "tolerance")
        if settings is None:
            settings = choose_settings(shard)
            tune_min_rows(shard.linears)
        return HFStage(shard, mode, settings, confirm(shard, settings))


def _order(depth: int) -> float:
    """Sorts depths as they are computed: the final norm comes last."""
    return float("inf") if depth == FINAL else depth
