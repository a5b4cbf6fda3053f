"""A pipeline stage on a Hugging Face checkpoint: ``StageBackend`` for ``asyncspec.core.jobs``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from asyncspec.backend.base import DeviceMemory, Guarantee, KVType, Mode, Quantize
from asyncspec.backend.kept_results import NOT_KEPT, KeptResults
from asyncspec.backend.tree_stage import Session, TreeStage
from asyncspec.core.jobs import Batch, Forward, SamplerOutput, StageJob, TensorRows
from asyncspec.core.tensors import WireTensor
from asyncspec.plugins.hf.attention.attention import TreeAttention
from asyncspec.plugins.hf.attention.batched_attention import BatchedAttention, attention_of
from asyncspec.plugins.hf.attention.cache import POSITION_BYTES, KVCache
from asyncspec.plugins.hf.attention.q8 import Scratch
from asyncspec.plugins.hf.checkpoint.checkpoint import Checkpoint, resolve_dtype
from asyncspec.plugins.hf.checkpoint.formats.settings import check_requantized
from asyncspec.plugins.hf.checkpoint.model_config import read_config, text_config
from asyncspec.plugins.hf.checkpoint.tensor_names import norm_name
from asyncspec.plugins.hf.kernels.cpu.capabilities import KernelSettings
from asyncspec.plugins.hf.kernels.cpu.dense import tune_min_rows
from asyncspec.plugins.hf.kernels.cpu.quantized import check_quantize
from asyncspec.plugins.hf.kernels.device import CPU, Device
from asyncspec.plugins.hf.kernels.dispatch import fast_settings
from asyncspec.plugins.hf.kernels.probing import noise
from asyncspec.plugins.hf.kernels.process import free_heap
from asyncspec.plugins.hf.model.self_test import SelfTest, confirm, run_tests
from asyncspec.plugins.hf.model.shard import Shard, load_shard
from asyncspec.plugins.hf.model.wire import from_wire, select, to_wire
from asyncspec_protocol.messages import FINAL


class _Output(Struct, frozen=True):
    """What a pass, or a part of it, computed for its rows."""

    # Hidden states [n, H], or on the last stage logits of the sampled rows [sampled, vocab].
    rows: Tensor
    # Hidden states [n, H] of earlier stages and of this one that the session reads.
    states: tuple[Tensor, ...]


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
        self._scratch = Scratch(shard.device.torch)
        self.device = shard.device.name

    def run(self, job: StageJob) -> object | None:
        with torch.inference_mode():
            return super().run(job)

    @property
    def chunk_rows(self) -> int:
        return self.settings.buckets[-1] if self.settings.buckets else 0

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(self._shape, capacity, self.shard.device, self._scratch)

    def device_memory(self) -> DeviceMemory | None:
        return self.shard.device.memory()

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

    @property
    def slot_format(self) -> str:
        return repr(self._shape) if self._shape.is_storable else ""

    def compute(self, job: Forward | Batch, passes: Sequence[Forward]) -> tuple[object, ...]:
        sessions = [self.begin(one) for one in passes]
        if len(passes) == 1 and not (
            sessions[0].admit.features or self.shard.device.is_accelerator
        ):
            return (self._lone(job, passes[0], sessions[0]),)
        outputs: list[list[_Output]] = [[] for _ in passes]
        max_rows = self.settings.buckets[-1] if self.settings.buckets else None
        for parts in cut_passes(passes, max_rows):
            part_sessions = [sessions[number] for number, _ in parts]
            part_outputs = self._run(job, [part for _, part in parts], part_sessions)
            for (number, _), output in zip(parts, part_outputs, strict=True):
                outputs[number].append(output)
        each = zip(passes, sessions, outputs, strict=True)
        return tuple(
            self._result(one, session, part_outputs) for one, session, part_outputs in each
        )

    def _lone(
        self, job: Forward | Batch, forward: Forward, session: Session[KVCache]
    ) -> Tensor | tuple[int, ...] | SamplerOutput:
        """The result of one session's pass on the CPU, whose hidden states nobody else reads."""
        tree = self._attention(job, [forward], [session])
        output = self._output(self._inputs(forward), tree, forward.head_rows)
        if not self.has_head:
            return output
        logits = output if forward.head_rows else output[:0]
        return session.sample(forward, logits.float().numpy(), None)

    def _attention(
        self, job: Forward | Batch, passes: Sequence[Forward], sessions: Sequence[Session[KVCache]]
    ) -> TreeAttention | BatchedAttention:
        """Attention of passes that are computed at once; it stops where ``job`` is abandoned."""
        tree = attention_of(
            [(s.cache, one.committed, one.rows) for s, one in zip(sessions, passes, strict=True)],
            self.settings if self.mode == "exact" else None,
        )
        tree.stop = lambda: self._abandoned is job
        return tree

    def _output(
        self, inputs: Tensor, tree: TreeAttention | BatchedAttention, head_rows: Sequence[int]
    ) -> Tensor:
        """Logits of ``head_rows``; hidden states of all rows where there are none."""
        arguments = (inputs, tree.positions, tree)
        if head_rows:
            return self.shard.logits(*arguments, self.shard.device.integers(head_rows))
        return self.shard.hidden(*arguments)

    def _run(
        self, job: Forward | Batch, passes: Sequence[Forward], sessions: Sequence[Session[KVCache]]
    ) -> list[_Output]:
        """Rows that are computed at once."""
        device = self.shard.device
        inputs = [self._inputs(one) for one in passes]
        tree = self._attention(job, passes, sessions)
        depths = {depth for session in sessions for depth in session.depths}
        # Copied to the same strides as without captured hidden states.
        hidden = _joined([rows[:, 0].contiguous() if rows.dim() == 3 else rows for rows in inputs])
        head_rows = [
            own.start + row
            for one, own in zip(passes, tree.slices, strict=True)
            for row in one.head_rows
        ]
        with capture_hidden_states(self.shard, depths) as captured:
            output = self._output(device.put(hidden), tree, head_rows)
        output, *states = device.fetch([output, *captured.values()])
        captured = dict(zip(captured, states, strict=True))
        ends = [0, *accumulate(len(one.head_rows) for one in passes)]
        return [
            _Output(
                _some(output, slice(ends[i], ends[i + 1]) if self.has_head else own),
                (
                    *(rows[:, 1:].unbind(1) if rows.dim() == 3 else ()),
                    *(_some(captured[depth], own) for depth in session.depths),
                ),
            )
            for i, (session, rows, own) in enumerate(
                zip(sessions, inputs, tree.slices, strict=True)
            )
        ]

    def _result(self, job: Forward, session: Session[KVCache], parts: list[_Output]) -> object:
        output = _joined([part.rows for part in parts])
        states = [_joined([*each]) for each in zip(*(part.states for part in parts), strict=True)]
        if not self.has_head:
            return torch.stack([output, *states], 1) if states else output
        features = torch.cat(states, 1) if session.admit.features else None
        return session.sample(job, output.float().numpy(), features)

    def _inputs(self, job: Forward) -> Tensor:
        """Tokens [n], hidden states [n, H] or, with captured ones, [n, 1 + captured, H]."""
        if self.has_embedding:
            return torch.tensor(job.tokens)
        assert job.hidden is not None, "checked by ``begin``"
        return select(job.hidden)


def _some(rows: Tensor, part: slice) -> Tensor:
    """``rows[own]``; of all of them without a view, which takes longer than to see that."""
    return rows if part.stop - part.start == rows.shape[0] else rows[part]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def cut_passes(passes: Sequence[Forward], max_rows: int | None) -> list[list[tuple[int, Forward]]]:
    """Parts of ``passes`` of at most ``max_rows`` rows together, in order, each with the number of
    its pass. A row's ancestors come before it, so they are in the caches by then."""
    if max_rows is None or sum(forward.row_count for forward in passes) <= max_rows:
        return [[*enumerate(passes)]]
    batches: list[list[tuple[int, Forward]]] = [[]]
    room = max_rows
    for number, forward in enumerate(passes):
        start = 0
        while start < forward.row_count:
            if not room:
                batches.append([])
                room = max_rows
            end = min(forward.row_count, start + room)
            batches[-1].append((number, _part(forward, start, end)))
            room -= end - start
            start = end
    return batches


def _part(job: Forward, start: int, end: int) -> Forward:
    """Rows [start, end) of a pass."""
    hidden = job.hidden
    return replace(
        job,
        rows=job.rows[start:end],
        tokens=job.tokens[start:end],
        hidden=hidden and TensorRows(hidden.handle, hidden.rows[start:end]),
        sampled_rows=tuple(row - start for row in job.sampled_rows if start <= row < end),
        scored_tokens=job.scored_tokens[start:end],
    )


def load_stage(
    checkpoint: Checkpoint,
    first: int,
    last: int,
    *,
    dtype: str = "auto",
    mode: Mode = "exact",
    settings: KernelSettings | None = None,
    quantize: Quantize = "none",
    kv_type: KVType = "auto",
    device: Device = CPU,
    results: KeptResults = NOT_KEPT,
) -> HFStage:
    """Read layers [first, last) as a stage. In exact mode the kernels are measured first, unless
    ``settings`` are given, and the loaded stage is tested, unless ``results`` has that. Raises
    ``UserError`` or ``CheckpointError`` with what to change."""
    if not device.is_accelerator:
        check_quantize(quantize)
    check_requantized(text_config(read_config(checkpoint.path)), quantize)
    torch_dtype = resolve_dtype(checkpoint.info, dtype)
    fast = fast_settings(device)
    with torch.inference_mode():
        initial = fast if mode == "fast" else settings or KernelSettings()
        shard = load_shard(
            checkpoint,
            *(first, last, torch_dtype, mode, initial),
            quantize=quantize,
            quantized_cache=kv_type == "q8_0",
            device=device,
        )
        free_heap(shard.weight_bytes)
        if mode == "fast":
            tune_min_rows(shard.linears)
            shard.warm_up()
            return HFStage(shard, mode, initial, "tolerance")
        if settings is not None:
            guarantee = confirm(shard, settings)
            shard.warm_up()
            return HFStage(shard, mode, settings, guarantee)
        result = results.get(
            "hf",
            {
                "model": checkpoint.fingerprint,
                "layers": (first, last),
                "dtype": str(torch_dtype),
                "quantize": quantize,
                "kv_type": kv_type,
                "device": device.description,
                "threads": torch.get_num_threads(),
                "weights": shard.describe(),
                "products": [
                    (type(x).__name__, x.in_features, x.out_features, x.description)
                    for x in shard.linears
                ],
            },
            SelfTest,
            lambda: run_tests(shard),
            lambda kept: kept.fits(shard),
        )
        result.restore(shard)
        shard.warm_up()
        return HFStage(shard, mode, result.settings, result.guarantee)


@contextmanager
def capture_hidden_states(shard: Shard, depths: Iterable[int]) -> Iterator[dict[int, Tensor]]:
    """Inside, a pass records its hidden states [n, H] at these depths, for EAGLE heads."""
    captured: dict[int, Tensor] = {}
    hooks = [_hook(shard, depth, captured) for depth in depths]
    try:
        yield captured
    finally:
        for hook in hooks:
            hook.remove()


def _hook(shard: Shard, depth: int, captured: dict[int, Tensor]) -> Any:
    inner = shard.model.model

    def on_input(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        captured[depth] = (args[0] if args else kwargs["hidden_states"])[0]

    def on_output(_module: Any, _inputs: Any, output: Any) -> None:
        # In some releases of transformers layers return a tuple.
        captured[depth] = (output[0] if isinstance(output, tuple) else output)[0]

    if depth == FINAL:
        return getattr(inner, norm_name(inner)).register_forward_hook(on_output)
    if depth == 0:
        return inner.layers[0].register_forward_pre_hook(on_input, with_kwargs=True)
    return inner.layers[depth - 1 - shard.layers.start].register_forward_hook(on_output)
