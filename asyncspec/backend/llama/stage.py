"""A pipeline stage on llama.cpp: ``LoadedStage`` for ``asyncspec.core.jobs``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from asyncspec.backend import sampling
from asyncspec.backend.base import Guarantee, Mode, ModelInfo, WireTensor
from asyncspec.backend.llama.cut import SCALED_INPUT, VirtualFile, cut
from asyncspec.backend.llama.engine import FIRST_CELLS, Abandoned, Engine, Floats, Settings
from asyncspec.backend.llama.footprint import footprint
from asyncspec.backend.llama.library import load_model
from asyncspec.backend.llama.self_test import confirm
from asyncspec.backend.llama.target import DTYPE, OpenTarget
from asyncspec.backend.llama.tree import TreeCache
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

Output = Floats | tuple[int, ...] | SamplerOutput


@dataclass(slots=True)
class _Session(StageSession):
    tree: TreeCache
    # The captured tensors of this stage.
    captures: tuple[str, ...]


class LlamaStage:
    """Layers [first, last) of a target with a tree cache per session. Not thread-safe."""

    def __init__(
        self,
        engine: Engine,
        info: ModelInfo,
        layers: tuple[int, int],
        *,
        weights: str = "",
        slot_bytes: int = 0,
        guarantee: Guarantee = "tolerance",
        input_scale: float = 1.0,
    ) -> None:
        self.engine, self.info, self.layers = engine, info, layers
        self.guarantee = guarantee
        self.weights = weights
        self._slot_bytes = slot_bytes
        self._input_scale = np.float32(input_scale)
        self._sessions: dict[SessionId, _Session] = {}
        self._running: StageJob | None = None
        self._abandoned: StageJob | None = None

    @property
    def has_embedding(self) -> bool:
        """Whether it is the first stage."""
        return self.layers[0] == 0

    @property
    def has_head(self) -> bool:
        """Whether it is the last stage."""
        return not self.engine.last

    def run(self, job: StageJob) -> object | None:
        """See ``StageBackend``. Raises ``ValueError`` for an invalid job."""
        match job:
            case Admit():
                self._admit(job)
            case Trim(session, slots):
                known = self._session(session)
                known.tree.trim(slots)
                known.tokens = None
            case Release(session):
                if (gone := self._sessions.pop(session, None)) is not None:
                    gone.tree.close()
            case Compact(session, start, keep):
                known = self._session(session)
                known.tree.compact(start, keep)
                if known.tokens is not None:
                    known.tokens.compact(start, keep)
            case Forward():
                return self._compute(job)[0]
            case Batch():
                return self._compute(job)
        return None

    def abandon(self, job: StageJob) -> None:
        """See ``StageBackend``."""
        self._abandoned = job
        if self._running is job:
            self.engine.stop()

    def pack(self, rows: TensorRows) -> WireTensor:
        """See ``StageBackend``."""
        values = _chosen(rows)
        return WireTensor(DTYPE, values.shape, values.data.cast("B"))

    def unpack(self, tensor: WireTensor) -> object:
        """See ``StageBackend``."""
        width = self.info.hidden_size
        if tensor.dtype != DTYPE:
            raise ValueError(f"hidden states of type {tensor.dtype}, expected {DTYPE}")
        shape = tensor.shape
        if len(shape) not in (2, 3) or shape[-1] != width or min(shape) < 1:
            raise ValueError(f"hidden states of shape {shape}, expected (n, {width})")
        if tensor.data.nbytes != 4 * math.prod(shape):
            raise ValueError(f"hidden states of {tensor.data.nbytes} bytes for shape {shape}")
        # The buffer may be used again.
        values = np.frombuffer(bytes(tensor.data), np.float32).reshape(shape)
        if not np.isfinite(values).all():
            raise ValueError("hidden states with numbers that are not finite")
        return values

    def check(self) -> None:
        """See ``StageBackend``."""
        for session in self._sessions.values():
            session.tree.check()

    def cache_bytes(self, slots: int) -> int:
        """See ``LoadedStage``."""
        return slots * self._slot_bytes

    def pass_seconds(self) -> dict[int, float]:
        """See ``LoadedStage``."""
        random = np.random.default_rng(0)
        shape = self.info.hidden_size

        def noise(rows: int) -> Floats:
            return random.standard_normal((rows, shape), np.float32)

        return pass_seconds(self, Trial(noise, self.info.vocab_size, self.has_head))

    def _admit(self, job: Admit) -> None:
        if job.session in self._sessions:
            raise ValueError(f"session {job.session} is admitted already")
        if job.common_prefix and job.sampling.penalises:
            raise ValueError("a session that penalises tokens must read them all")
        parent = self._session(job.parent_session) if job.common_prefix else None
        tree = TreeCache(self.engine)
        if parent is not None:
            tree.copy_prefix(parent.tree, job.common_prefix)
        penalises = self.has_head and job.sampling.penalises
        self._sessions[job.session] = _Session(
            tree=tree,
            sampling=job.sampling,
            tokens=SlotTokens(job.prompt_length) if penalises else None,
            features=job.features,
            captures=tuple(name for depth in job.features for name in self._capture(depth)),
            top_logprobs=job.top_logprobs,
            log_probs=job.log_probs,
        )

    def _capture(self, depth: int) -> tuple[str, ...]:
        """The tensor of this stage that ``depth`` of ``Open.features`` means, if there is one."""
        first, end = self.layers
        if depth == FINAL:
            return ("result_norm",) if self.has_head else ()
        if depth == 0:
            return ("embd",) if self.has_embedding else ()
        return (f"l_out-{depth - 1 - first}",) if first < depth <= end else ()

    def _compute(self, job: Forward | Batch) -> tuple[object, ...]:
        """The result of each pass of a job."""
        passes = job.passes if isinstance(job, Batch) else (job,)
        rows, wanted, earlier = [], [], []
        sessions = [self._session(one.session) for one in passes]
        inputs = [self._inputs(one) for one in passes]
        for one, session, (given, captured) in zip(passes, sessions, inputs, strict=True):
            if one.sampled_rows and not self.has_head:
                raise ValueError("only the last stage samples")
            if session.tokens is not None:
                session.tokens.write(
                    one.committed, one.rows, checked_tokens(one, self.info.vocab_size)
                )
            nodes = session.tree.grow(one.committed, one.rows, [*given])
            rows += [(session.tree.branches, node) for node in nodes]
            sampled = set(one.sampled_rows)
            wanted += [row in sampled for row in range(len(nodes))]
            earlier.append(captured)
        captures = {name for session in sessions for name in session.captures}
        self.engine.resume()
        self._running = job
        try:
            if self._abandoned is job:
                return ((),) * len(passes)
            found = self.engine.run(rows, wanted, captures)
        except Abandoned:
            return ((),) * len(passes)
        finally:
            self._running = None
        results, row, head = [], 0, 0
        for one, session, before in zip(passes, sessions, earlier, strict=True):
            own = slice(row, row + len(one.rows))
            taken = [found.captured[name][own] for name in session.captures]
            captured = np.concatenate([before, *(rows[:, None] for rows in taken)], 1)
            if self.has_head:
                logits = found.logits[head : head + len(one.sampled_rows)]
                results.append(self._sampled(one, session, logits, captured))
            else:
                last = found.captured[self.engine.last][own]
                results.append(
                    np.concatenate([last[:, None], captured], 1) if captured.shape[1] else last
                )
            row, head = own.stop, head + len(one.sampled_rows)
        return tuple(results)

    def _sampled(self, job: Forward, session: _Session, logits: Floats, captured: Floats) -> Output:
        """Sample from logits [len(job.sampled_rows), vocab]. ``captured``: [n, taps, width]."""
        output = session.sample(job, logits, sampling)
        if not session.features:
            return output
        if isinstance(output, tuple):
            output = SamplerOutput(output)
        return replace(output, features=captured.reshape(len(captured), -1))

    def _inputs(self, job: Forward) -> tuple[Sequence[int] | Floats, Floats]:
        """Of each row its token or hidden state, and what earlier stages captured [n, taps, H]."""
        width = self.info.hidden_size
        if self.has_embedding:
            return checked_tokens(job, self.info.vocab_size), np.empty(
                (len(job.rows), 0, width), np.float32
            )
        if job.hidden is None or len(job.hidden.rows) != len(job.rows) or not job.rows:
            raise ValueError(f"no hidden states for {len(job.rows)} rows")
        values = _chosen(job.hidden)
        values = values if values.ndim == 3 else values[:, None]
        return values[:, 0] * self._input_scale, values[:, 1:]

    def _session(self, session: SessionId) -> _Session:
        if session not in self._sessions:
            raise ValueError(f"session {session} was never admitted")
        return self._sessions[session]


def _chosen(rows: TensorRows) -> Floats:
    """The rows of a handle [n, ...], contiguous."""
    values = rows.handle
    if not isinstance(values, np.ndarray):
        raise TypeError(f"hidden states of another backend: {type(values).__name__}")
    return np.ascontiguousarray(
        values if len(rows.rows) == len(values) else values[list(rows.rows)]
    )


def load_stage(target: OpenTarget, first: int, last: int, *, mode: Mode = "exact") -> LlamaStage:
    """Read layers [first, last) as a stage; in exact mode it is tested. Raises
    ``CheckpointError``."""
    info = target.info
    model = load_model(VirtualFile(*cut(target.model, first, last)), str(target.path))
    output = "" if last == info.layers else f"l_out-{last - first - 1}"
    settings = Settings(exact=mode == "exact", least_cells=_least_cells(target))
    engine = Engine(model, settings, output)
    guarantee: Guarantee = "tolerance"
    if mode == "exact":
        guarantee = confirm(engine, info.vocab_size, embeds=first == 0)
    return LlamaStage(
        engine,
        info,
        (first, last),
        weights=f"{target.weights}, llama.cpp",
        slot_bytes=footprint(target, (first, last)).slot,
        guarantee=guarantee,
        input_scale=info.hidden_size**-0.5 if first and info.architecture in SCALED_INPUT else 1.0,
    )


def _least_cells(target: OpenTarget) -> int:
    """llama.cpp takes the factors of long contexts where the cache is longer than the context the
    model was first trained with: they are to be the same however much the cache has grown."""
    original = int(target.model.get("{arch}.rope.scaling.original_context_length", 0))
    long = any(name.startswith("rope_factors_long") for name in target.model.tensors)
    return original + FIRST_CELLS if long and original < target.info.context_length else FIRST_CELLS
