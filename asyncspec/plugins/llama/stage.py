"""A pipeline stage on llama.cpp: ``StageBackend`` for ``asyncspec.core.jobs``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from asyncspec.backend.base import (
    CPU,
    DEFAULT_OPTIONS,
    DeviceMemory,
    EngineOptions,
    Guarantee,
    Mode,
    ModelInfo,
)
from asyncspec.backend.kept_results import NOT_KEPT, KeptResults
from asyncspec.backend.tree_stage import Abandoned, TreeStage, check_hidden_states
from asyncspec.core.jobs import Admit, Batch, Forward, StageJob, TensorRows
from asyncspec.core.tensors import WireTensor
from asyncspec.plugins.llama.attention import flash_type
from asyncspec.plugins.llama.cache_engine import CacheEngine, Floats, Settings
from asyncspec.plugins.llama.cut import SCALED_INPUT, VirtualFile, cut
from asyncspec.plugins.llama.devices import Device, find, layers_on_gpu
from asyncspec.plugins.llama.footprint import first_cells, footprint, sequences, slot_bytes
from asyncspec.plugins.llama.layer_kinds import layer_output
from asyncspec.plugins.llama.library import load_model, threads
from asyncspec.plugins.llama.recurrent import new_engine
from asyncspec.plugins.llama.self_test import SelfTest, run_tests
from asyncspec.plugins.llama.target import DTYPE, OpenTarget
from asyncspec.plugins.llama.tree import TreeCache
from asyncspec.plugins.llama.trial import repacks
from asyncspec_protocol.messages import FINAL

_KV_TYPES = {"auto": 1, "f16": 1, "q8_0": 8}
"""As in ``enum ggml_type``."""


_SCALED = "inp_scaled"
"""llama.cpp's name of what families of ``SCALED_INPUT`` make of their input. Scaled down before, it
would be rounded twice."""

TILES = "GGML_CPU_TILED_MM"
"""llama.cpp's variable of the environment for products in tiles, which it reads before its first
one. It uses them from eight rows of K-quants on. They round otherwise, so that every pass would
need eight rows: without them a row takes a fifth, four take .6, 16 take 2.4 times as long."""


class LlamaStage(TreeStage[TreeCache]):
    """Layers of a target."""

    def __init__(
        self,
        engine: CacheEngine[Any],
        info: ModelInfo,
        layers: tuple[int, int],
        *,
        weights: str = "",
        slot_bytes: int = 0,
        session_bytes: int = 0,
        guarantee: Guarantee = "tolerance",
        gpu: Device | None = None,
        gpu_layers: int = -1,
        cell_bytes: int = 0,
    ) -> None:
        super().__init__(info, layers, guarantee)
        self.engine = engine
        self.device = engine.settings.device or CPU
        self.weights = weights
        self._slot_bytes, self._session_bytes = slot_bytes, session_bytes
        self._gpu, self._on_gpu = gpu, layers_on_gpu(layers[1] - layers[0], gpu_layers)
        self._cell_bytes = cell_bytes
        self._running: StageJob | None = None

    def abandon(self, job: StageJob) -> None:
        super().abandon(job)
        if self._running is job:
            self.engine.stop()

    def pack(self, rows: TensorRows) -> WireTensor:
        values = _chosen(rows)
        return WireTensor(DTYPE, values.shape, values.data.cast("B"))

    def unpack(self, tensor: WireTensor) -> object:
        check_hidden_states(tensor, DTYPE, self.info.hidden_size)
        # The buffer may be used again.
        values = np.frombuffer(bytes(tensor.data), np.float32).reshape(tensor.shape)
        if not np.isfinite(values).all():
            raise ValueError("hidden states with numbers that are not finite")
        return values

    def device_memory(self) -> DeviceMemory | None:
        if self._gpu is None or not self._on_gpu:
            return None
        # Keys and values are where their layer is.
        (first, end), held = self.layers, self.engine.held_bytes(self._cell_bytes)
        return self._gpu.memory(held * self._on_gpu // (end - first))

    def cache_bytes(self, slots: int) -> int:
        return slots * self._slot_bytes

    @property
    def session_bytes(self) -> int:
        return self._session_bytes

    @property
    def slot_format(self) -> str:
        model = self.engine.model
        layout = f"{self.engine.settings} {self._slot_bytes} {model.window}"
        return "" if model.recurrent else layout

    def noise(self, rows: int) -> Floats:
        shape = rows, self.info.hidden_size
        return np.random.default_rng(0).standard_normal(shape, np.float32)

    def _admit(self, job: Admit) -> None:
        parent = self._sessions.get(job.parent_session) if job.common_prefix else None
        self.engine.park_kept(parent and parent.cache.branches)
        super()._admit(job)
        self.engine.park_kept()  # the parent, where little of it is shared

    def new_cache(self, capacity: int) -> TreeCache:
        return TreeCache(self.engine)

    def compute(self, job: Forward | Batch, passes: Sequence[Forward]) -> tuple[object, ...]:
        rows, wanted, earlier = [], [], []
        sessions = [self.begin(forward) for forward in passes]
        names = [list(map(self._captured_tensor, session.depths)) for session in sessions]
        for forward, session in zip(passes, sessions, strict=True):
            inputs, captured = self._inputs(forward)
            nodes = session.cache.grow(forward.committed, forward.rows, [*inputs])
            rows += [(session.cache.branches, node) for node in nodes]
            head_rows = set(forward.head_rows)
            wanted += [row in head_rows for row in range(len(nodes))]
            earlier.append(captured)
        self.engine.resume()
        self._running = job
        try:
            if self._abandoned is job:
                raise Abandoned
            result = self.engine.run(rows, wanted, set().union(*names))
        finally:
            self._running = None
        results: list[object] = []
        row = head = 0
        for forward, session, own_names, kept in zip(passes, sessions, names, earlier, strict=True):
            span = slice(row, row + len(forward.rows))
            taken = [*kept, *(result.captured[name][span, None] for name in own_names)]
            if self.has_head:
                logits = result.logits[head : head + len(forward.head_rows)]
                joined = np.concatenate(taken, 1) if session.admit.features else None
                features = None if joined is None else joined.reshape(len(joined), -1)
                results.append(session.sample(forward, logits, features))
            else:
                last = result.captured[self.engine.last][span]
                results.append(np.concatenate([last[:, None], *taken], 1) if taken else last)
            row, head = span.stop, head + len(forward.head_rows)
        return tuple(results)

    def _captured_tensor(self, depth: int) -> str:
        """The tensor of this stage that ``depth`` of ``Open.features`` means."""
        if depth == FINAL:
            return "result_norm"
        if not depth:
            return "embd"
        return layer_output(self.info.architecture, depth - 1 - self.layers[0])

    @property
    def chunk_rows(self) -> int:
        return 0 if self.device == CPU else self.engine.most_rows

    def _inputs(self, job: Forward) -> tuple[Sequence[int] | Floats, list[Floats]]:
        """Each row's token or hidden state, and what earlier stages kept [n, depths, H], if they
        kept any."""
        if self.has_embedding:
            return job.tokens, []
        assert job.hidden is not None, "checked by ``begin``"
        states, earlier = _chosen(job.hidden), []
        if states.ndim == 3:
            states, earlier = states[:, 0].copy(), [states[:, 1:]]
        return states, earlier


def _chosen(rows: TensorRows) -> Floats:
    """The rows of a handle [n, ...], contiguous."""
    values = rows.handle
    if not isinstance(values, np.ndarray):
        raise TypeError(f"hidden states of another backend: {type(values).__name__}")
    return np.ascontiguousarray(
        values if len(rows.rows) == len(values) else values[list(rows.rows)]
    )


def load_stage(
    target: OpenTarget,
    first: int,
    last: int,
    *,
    mode: Mode = "exact",
    options: EngineOptions = DEFAULT_OPTIONS,
    results: KeptResults = NOT_KEPT,
) -> LlamaStage:
    """Read layers [first, last) as a stage; it is tested, unless ``results`` has that. Raises
    ``UserError``."""
    info = target.info
    if mode == "exact":  # before results are looked up, which depend on it; a trial's child has it
        os.environ.setdefault(TILES, "0")
    taken = footprint(target, (first, last), options.kv_type)
    gpu = find(options.device)
    depends = {
        "model": target.fingerprint,
        "layers": (first, last),
        "mode": mode,
        "options": options,
        "device": gpu and (gpu.name, gpu.description),
        "threads": threads(),
    }
    tried = partial(repacks, target, (first, last), mode, options)
    repack = results.get("llama repack", depends, bool, tried)
    engine = load_engine(target, first, last, mode, options, repack=repack)
    tests = partial(run_tests, engine, info.vocab_size, embeds=first == 0)
    result = results.get("llama", {**depends, "repack": repack}, SelfTest, tests)
    result.restore(engine)
    layout = " repacked" if repack else ""
    return LlamaStage(
        engine,
        info,
        (first, last),
        weights=f"{target.weights}{layout}, llama.cpp on {engine.settings.device or 'the CPU'}",
        slot_bytes=taken.slot,
        session_bytes=taken.session,
        guarantee=result.guarantee,
        gpu=gpu,
        gpu_layers=options.gpu_layers,
        cell_bytes=slot_bytes(target, (first, last), options.kv_type),
    )


def load_engine(
    target: OpenTarget, first: int, last: int, mode: Mode, options: EngineOptions, *, repack: bool
) -> CacheEngine[Any]:
    """The engine of a stage, not tested. Raises ``UserError``."""
    device = find(options.device)
    model = load_model(
        VirtualFile(*cut(target.model, first, last)),
        str(target.path),
        device=device.handle if device else 0,
        gpu_layers=options.gpu_layers,
        repack=repack,
    )
    settings = Settings(
        exact=mode == "exact" and not model.recurrent,
        kv_type=_KV_TYPES[options.kv_type],
        flash=flash_type(options, mode, on_gpu=device is not None),
        device=device.name if device else "",
        least_cells=first_cells(target),
        sequences=sequences(target, (first, last)),
    )
    info = target.info
    return new_engine(
        model,
        settings,
        "" if last == info.layers else layer_output(info.architecture, last - first - 1),
        first=_SCALED if first and info.architecture in SCALED_INPUT else "",
    )
